"""Property-based requests from the OpenAPI document, by schemathesis: `python -m tests.fuzz_api [--requests 20000]`.

Half of them go to a server with the fake executor and a store of batches, half to the embedded model. Exits with 1 on a
5xx, a hang or a closed connection. Needs `pip install schemathesis`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.configs.sources import embedded_model
from tests.server.conftest import running_server, write_model_folder

NUM_OPERATIONS = 73
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
PER_REQUEST_SECONDS = 30  # longer is a hang


def fuzz(url: str, folder: str, num_requests: int, seconds: int, seed: int = 1) -> tuple[int, str]:
    """The number of requests sent, and schemathesis's report of what failed, empty if nothing did."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--checks", CHECKS, "--continue-on-failure", "--suppress-health-check", "all"]
    command += ["--phases", "coverage,fuzzing", "--mode", "all", "--workers", "2", "--no-color", "--no-shrink"]
    command += ["--request-timeout", str(PER_REQUEST_SECONDS), "--warnings", "off", "--seed", str(seed)]
    command += ["--max-examples", str(max(1, num_requests // NUM_OPERATIONS)), "--max-time", str(seconds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 120, cwd=folder)
    report = result.stdout + result.stderr
    sent = sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) generated", report))
    return sent, "" if result.returncode == 0 else report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    failed, total = False, 0
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            write_model_folder(Path(folder)).as_posix(): {},
            embedded_model(): {"distributed_executor_backend": None, "kv_cache_memory_bytes": 2**26},
        }
        for i, (model, settings) in enumerate(kinds.items()):
            with running_server(model, batch_dir=f"{folder}/batches{i}", **settings) as server:
                server.wait_ready(60)
                sent, report = fuzz(server.url, folder, given.requests // 2, given.seconds // 2, given.seed)
            print(f"{model}: {sent} requests, {'failures' if report else 'no failures'}\n{report[-20000:]}", flush=True)
            failed, total = failed or bool(report), total + sent
    print(f"{total} requests")
    return failed


if __name__ == "__main__":
    sys.exit(main())
