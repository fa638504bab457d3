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

from quire.cli.bench import serve
from quire.cli.bench.datasets import make_samples
from quire.cli.bench.load import Target, run_load
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import summarize
from quire.configs.sources import EMBEDDED_MODEL
from tests.helpers.engine.fake_executor import BACKEND


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        nargs="?",
        default=str(EMBEDDED_MODEL),
        help="folder with tokenizer.json and config.json (default: the embedded model)",
    )
    parser.add_argument(
        "--max-concurrency", type=serve.concurrencies, default=[1, 16, 64], help="numbers of streams (default: 1,16,64)"
    )
    parser.add_argument(
        "--api-server-count",
        type=serve.concurrencies,
        default=[1],
        help="numbers of frontend processes, one server each (default: 1)",
    )
    parser.add_argument("--requests-per-stream", type=int, default=4, help="requests per stream (default: 4)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default: 128)")
    parser.add_argument("--output-len", type=int, default=256, help="output tokens (default: 256)")
    arguments = parser.parse_args(argv)
    print(
        f"{'frontends':>9} {'streams':>8} {'tok/s':>9} {'TTFT p50 ms':>12} {'ITL p50 ms':>11}   CPU us per "
        f"token: {'server':>7} {'engine':>7} {'client':>7}"
    )
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
            pid = server.process.pid
            groups = servers_of(pid, num_frontends), [engine_of(pid)], [psutil.Process()]
            before = [cpu_seconds(group) for group in groups]
            results, duration = await run_load(target, samples, [0.0] * len(samples), streams, lambda result: None)
            spent = [cpu_seconds(group) - start for group, start in zip(groups, before, strict=True)]
            figures = summarize(results, duration, [], {})
            if figures["failed"]:
                raise RuntimeError(next(result.error for result in results if result.error))
            costs = " ".join(f"{1e6 * seconds / figures['total_output_tokens']:>7.0f}" for seconds in spent)
            print(
                (
                    f"{num_frontends:>9} {streams:>8} {figures['output_throughput']:>9.0f} "
                    f"{figures['median_ttft_ms']:>12.1f} {figures['median_itl_ms']:>11.2f}   {'':>17} {costs}"
                ),
                flush=True,
            )


def dataset(arguments: argparse.Namespace, num_prompts: int) -> argparse.Namespace:
    sizes = f"--num-prompts {num_prompts} --input-len {arguments.input_len} --output-len {arguments.output_len}"
    return serve.parser().parse_args(sizes.split())


def engine_of(pid: int) -> psutil.Process:
    (engine,) = [child for child in psutil.Process(pid).children() if "quire.engine.core" in child.cmdline()]
    return engine


def servers_of(pid: int, num_frontends: int) -> list[psutil.Process]:
    """Return the server's process, and its frontends if they are separate processes."""
    frontends = [
        child for child in psutil.Process(pid).children() if "quire.server.frontends.member" in child.cmdline()
    ]
    assert len(frontends) == (num_frontends if num_frontends > 1 else 0)
    return [psutil.Process(pid), *frontends]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
