"""Sends requests from the OpenAPI document by schemathesis: `python -m tests.helpers.fuzz_api [--requests 20000]`.

Half of the requests go to a server with the fake executor and a store of batches, half to the embedded model, in
parallel. A
failure is a 5xx, a hang, a closed connection, or an answer that the document does not describe: its status, content
type, headers or body. A 503 is no failure if it has the Retry-After header that the document promises; they are
counted.
Prints every failure with the curl command that repeats it, and exits with 1. Needs `pip install schemathesis`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from quire.configs.sources import embedded_model
from tests.helpers.server.running import running_server, write_model_folder

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]
SETTINGS = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503]\n'
PER_REQUEST_SECONDS = 30  # seconds; a longer request counts as a hang


@dataclass
class Result:
    num_requests: int
    num_unavailable: int  # answers 503
    failures: str  # schemathesis's report; empty: none


def fuzz(url: str, folder: Path, num_requests: int, seconds: int, seed: int = 1) -> Result:
    """Send about `num_requests` to a server, for at most `seconds`."""
    folder.mkdir()
    (folder / "schemathesis.toml").write_text(SETTINGS)
    num_operations = sum(map(len, httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"].values()))
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += ["--phases", "coverage,fuzzing", "--mode", "all", "--continue-on-failure", "--no-shrink", "--no-color"]
    # one worker: the threads of several change the interpreter's recursion limit under each other
    command += ["--workers", "1", "--suppress-health-check", "all", "--warnings", "off", "--seed", str(seed)]
    command += ["--request-timeout", str(PER_REQUEST_SECONDS), "--max-time", str(seconds)]
    command += ["--max-examples", str(max(1, num_requests // num_operations))]
    command += ["--report", "json", "--report-json-path", "report.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 120, cwd=folder)
    report = run.stdout + run.stderr
    if not (folder / "report.json").exists():
        return Result(0, 0, report)
    sent = json.loads((folder / "report.json").read_text())["test_cases"]["generated"]
    found = re.search(r"^=+ (ERRORS|FAILURES) =+$", report, re.MULTILINE)
    failures = "" if run.returncode == 0 else report[found.start() if found else 0 :]
    return Result(sent, _num_unavailable(url), failures)


def _num_unavailable(url: str) -> int:
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(int(float(n)) for n in re.findall(r'^http_requests_total{.*status="5xx".*} (\S+)$', metrics, re.M))


def fuzz_both(num_requests: int, seconds: int, seed: int = 1) -> dict[str, Result]:
    """Return the results of the server with the fake executor and of the embedded model."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers, ThreadPoolExecutor() as threads:
        folder, started = Path(name), {}
        (folder / "model").mkdir()
        for kind, model, settings in (
            ("fake", write_model_folder(folder / "model").as_posix(), {}),
            ("embedded", embedded_model(), {"distributed_executor_backend": None, "kv_cache_memory_bytes": 2**26}),
        ):
            server = servers.enter_context(
                running_server(
                    model, batch_dir=f"{folder}/batches-{kind}", slot_save_path=f"{folder}/slots-{kind}", **settings
                )
            )
            url = server.wait_ready(60).url
            started[kind] = threads.submit(fuzz, url, folder / f"run-{kind}", num_requests // 2, seconds, seed)
        return {kind: future.result() for kind, future in started.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    results = fuzz_both(given.requests, given.seconds, given.seed)
    for kind, result in results.items():
        outcome = f"failures:\n{result.failures}" if result.failures else "no failures"
        print(f"{kind}: {result.num_requests} requests, {result.num_unavailable} answered 503, {outcome}", flush=True)
    print(f"{sum(result.num_requests for result in results.values())} requests")
    return any(result.failures for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
