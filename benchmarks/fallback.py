"""Output rate of models that transformers computes: quire with `--model-impl transformers`, and `transformers serve`
with continuous batching, on one checkpoint, in turn: A B A B.

    python benchmarks/make_model.py qwen3-0.6b /tmp/qwen3-0.6b
    python benchmarks/fallback.py /tmp/qwen3-0.6b --transformers PEER/bin/transformers [--rounds 2] [--streams 8]

PEER is a virtual environment with transformers[serving] and accelerate, which the server needs.
Both servers run on this machine, one at a time. Every stream sends one request and waits for all of its answer; every
round has other prompts. Prints a Markdown table with output tokens per second and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "with",
    "as",
    "at",
    "by",
    "from",
    "it",
    "that",
    "this",
)
START_SECONDS = 180


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint, with a tokenizer")
    parser.add_argument("--transformers", default="transformers", metavar="COMMAND", help="transformers' command line")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each server (default: 2)")
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--words", type=int, default=60, help="words of a prompt (default: 60)")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of a request (default: 32)")
    parser.add_argument("--port", type=int, default=8130, help="port of both servers (default: 8130)")
    options = parser.parse_args(argv)
    rates: dict[str, list[float]] = {name: [] for name in commands(options)}
    for number in range(options.rounds):
        for name, command in commands(options).items():
            with running(command, options.port):
                measure(options, seed=-1 - number)  # compiles, and fills caches of the allocator
                rates[name].append(measure(options, seed=number))
            print(f"round {number + 1}: {name}: {rates[name][-1]:.1f} tok/s", flush=True)
    ours, theirs = (statistics.median(values) for values in rates.values())
    print(f"| streams | {' | '.join(rates)} | ratio |\n|{'---|' * (len(rates) + 2)}")
    cells = (", ".join(f"{rate:.1f}" for rate in values) for values in rates.values())
    print(f"| {options.streams} | {' | '.join(cells)} | {ours / theirs:.2f} |")
    return 0


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each server."""
    port = str(options.port)
    quire = [sys.executable, "-m", "quire", "serve", options.model, "--model-impl", "transformers", "--port", port]
    peer = [options.transformers, "serve", options.model, "--continuous-batching", "--device", "cpu"]
    return {
        "quire --model-impl transformers": [*quire, "--dtype", "bfloat16", "--max-model-len", "2048"],
        # by default its cache takes half of the memory
        "transformers serve --continuous-batching": [
            *peer,
            "--dtype",
            "bfloat16",
            "--port",
            port,
            "--cb-num-blocks",
            "64",
            "--cb-max-batch-tokens",
            "2048",
        ],
    }


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the block ends. Raises RuntimeError if it does not become ready."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin slow down both on a busy machine
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def measure(options: argparse.Namespace, seed: int) -> float:
    """Output tokens per second of all streams together."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(options.words)) for _ in range(options.streams)]
    start = time.perf_counter()
    with ThreadPoolExecutor(options.streams) as pool:
        answers = list(pool.map(lambda prompt: complete(options, prompt), prompts))
    seconds = time.perf_counter() - start
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds


def complete(options: argparse.Namespace, prompt: str) -> dict[str, Any]:
    body = {"model": options.model, "prompt": prompt, "max_tokens": options.tokens, "temperature": 0.0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{options.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
