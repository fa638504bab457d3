"""Measures the overhead of everything except the model: HTTP streaming through server and engine with the fake
executor, which computes nothing.

python benchmarks/overhead.py MODEL_FOLDER [--max-concurrency 1,16,64] [--output-len 128] [--api-server-count 1,4]
(MODEL_FOLDER for its tokenizer and vocabulary; needs psutil)

Prints the ceiling in tokens per second, and microseconds of CPU time per token in the server (all its frontends), the
engine and this client. Several frontends gain something only where each has a core of its own in addition to those of
the engine and of this client, which is one process: on two cores they lose.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks.server import cpu_seconds
from quire.cli.bench import serve
from quire.cli.bench.datasets import make_samples
from quire.cli.bench.load import Target, run_load
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import summarize
from quire.configs.sources import EMBEDDED_MODEL
from tests.helpers.engine.fake_executor import BACKEND


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(EMBEDDED_MODEL), help="default: the embedded model")
    numbers = {"type": serve.concurrencies, "metavar": "N,..."}
    parser.add_argument(
        "--max-concurrency", default=[1, 16, 64], help="numbers of streams (default: 1,16,64)", **numbers
    )
    parser.add_argument("--api-server-count", default=[1], help="frontend processes, a server for each", **numbers)
    parser.add_argument("--requests-per-stream", type=int, default=4, help="requests per stream (default: 4)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default: 128)")
    parser.add_argument("--output-len", type=int, default=256, help="output tokens (default: 256)")
    arguments = parser.parse_args(argv)
    print("frontends  streams     tok/s  TTFT p50 ms  ITL p50 ms   CPU us per token:  server  engine  client")
    for count in arguments.api_server_count:
        asyncio.run(measure(arguments, count))
    return 0


async def measure(arguments: argparse.Namespace, num_frontends: int) -> None:
    port = free_port()
    flags = {
        "--port": port, "--distributed-executor-backend": BACKEND, "--max-num-seqs": 256,
        "--num-gpu-blocks-override": 65536, "--served-model-name": "fake", "--api-server-count": num_frontends,
    }  # fmt: skip
    command = [sys.executable, "-m", "quire", "serve", arguments.model]
    command += [str(part) for flag in flags.items() for part in flag]
    with ServerProcess(command, port, environment={"FAKE_EXECUTOR": "validate=0"}) as server:
        await server.wait_for("/health", timeout=60)
        target = Target(server.client, "/v1/completions", "fake", ignore_eos=True, temperature=0.0)
        encoder = serve.load_encoder(arguments.model, None)
        for streams in arguments.max_concurrency:
            samples = make_samples(dataset(arguments, streams * arguments.requests_per_stream), encoder, seed=streams)
            groups = processes(server.process.pid, num_frontends)
            before = [cpu_seconds(group) for group in groups]
            results, duration = await run_load(target, samples, [0.0] * len(samples), streams, lambda result: None)
            spent = [cpu_seconds(group) - start for group, start in zip(groups, before, strict=True)]
            figures = summarize(results, duration, [], {})
            if figures["failed"]:
                raise RuntimeError(next(result.error for result in results if result.error))
            costs = " ".join(f"{1e6 * seconds / figures['total_output_tokens']:>7.0f}" for seconds in spent)
            rate, first, gap = (figures[name] for name in ("output_throughput", "median_ttft_ms", "median_itl_ms"))
            print(f"{num_frontends:>9} {streams:>8} {rate:>9.0f} {first:>12.1f} {gap:>11.2f} {costs:>42}", flush=True)


def dataset(arguments: argparse.Namespace, num_prompts: int) -> argparse.Namespace:
    sizes = f"--num-prompts {num_prompts} --input-len {arguments.input_len} --output-len {arguments.output_len}"
    return serve.parser().parse_args(sizes.split())


def processes(pid: int, num_frontends: int) -> tuple[list[psutil.Process], ...]:
    """Return the processes of the server (with its frontends, if they are separate), the engine and this client."""
    server = psutil.Process(pid)
    engines, frontends = (
        [child for child in server.children() if module in child.cmdline()]
        for module in ("quire.engine.core", "quire.server.frontends.member")
    )
    assert len(engines) == 1 and len(frontends) == (num_frontends if num_frontends > 1 else 0)
    return [server, *frontends], engines, [psutil.Process()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
