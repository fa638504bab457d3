"""Measures how much other work delays the first token of a request.

`python -m benchmarks.fairness [--seconds | --batch]`. In steps, exactly: the scheduler with an executor that computes
nothing, prompts of 100,000 tokens of one tenant, and a prompt of another that arrives meanwhile. `--seconds` also
measures time: a server with the embedded model, to which one key sends the longest prompts without end, and the first
tokens of another key, alone and next to them. `--batch` measures interactive requests next to a batch instead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.server import serving

if TYPE_CHECKING:
    from quire.engine.step import Step

BUDGET = 2048  # tokens of a step
PER_TOKEN, PER_STEP = 1e-3, 5e-3  # seconds: two cores with a model of 135 million parameters
LONG = 100_000
PROMPTS = (200, 1024, 1500, 2048, 3000, 6000, 20_000)
KEYS = "keys: [{name: long, key: long-key}, {name: other, key: other-key}]"
FLAGS = ["--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--max-num-seqs", "16", "--deterministic"]


def steps(long_prompts: int, prompt: int) -> int:
    """Return the steps until the first token of a prompt that arrives while others are computed."""
    return until_first_token(long_prompts, prompt, 0.0)[0]


def until_first_token(long_prompts: int, prompt: int, per_token: float, per_step: float = 0.0) -> tuple[int, float]:
    """Return steps and seconds until the first token of a prompt that arrives during a step of others, on a device that
    takes `per_step` and `per_token` seconds.
    """
    from tests.helpers.engine.harness import CLIENT, Engine, fake_config

    sizes = {"max_model_len": "131072", "max_num_batched_tokens": BUDGET, "num_gpu_blocks_override": 60_000}
    engine, seconds = Engine(fake_config(max_num_seqs=8, block_size=16, **sizes)), 0.0

    def note_time(step: Step) -> None:
        nonlocal seconds
        took = per_step + per_token * step.num_tokens
        engine.scheduler.budget.pace.record_step(step.num_tokens, len(step.requests), took)
        seconds += took

    engine.scheduler.budget.pace.record_end = note_time
    for tenant in ("long", "other"):  # both are known, and how long a step takes
        engine.add(tenant + "-before", [8, *range(600)], max_tokens=1, tenant=tenant)
        engine.run()
    for i in range(long_prompts):
        engine.add(f"long-{i}", [i, *(j % 900 for j in range(LONG))], max_tokens=1, tenant="long")
    for _ in range(3 if long_prompts else 0):
        before = seconds
        engine.turn()
    engine.add("other", [7, *(j % 900 for j in range(prompt - 1))], max_tokens=1, tenant="other")
    begun, count = (seconds + before) / 2 if long_prompts else seconds, 0
    while (CLIENT, "other") not in engine.outputs:
        engine.turn()
        count += 1
    return count, seconds - begun


def first_token(http: httpx.Client, rng: random.Random, num_words: int, key: str) -> float:
    """Return the seconds until the first token."""
    body = {"prompt": " ".join(rng.choice("abcdefgh") for _ in range(num_words)), "max_tokens": 1, "stream": True}
    started = time.monotonic()
    with http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": key}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - started
    raise RuntimeError(f"no token: {answer.status_code}")


@contextmanager
def clients(flags: Sequence[str]) -> Iterator[Callable[[], httpx.Client]]:
    """Run a server until the block ends; yields what makes a client of it."""
    with serving(flags) as server:
        yield lambda: httpx.Client(base_url=server.url, trust_env=False, timeout=120)


def in_seconds(num_words: Sequence[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name, "keys.yaml").write_text(KEYS)
        with clients([*FLAGS, "--api-key-file", f"{name}/keys.yaml"]) as client, client() as http:
            info = http.get("/v1/models", headers={"x-api-key": "other-key"}).json()["data"][0]
            longest, rng, done = info["max_model_len"] // 2 - 64, random.Random(0), threading.Event()
            alone = {n: median(http, rng, n, rounds) for n in num_words}

            def send(seed: int) -> None:
                own = random.Random(seed)
                with client() as other:
                    while not done.is_set():
                        first_token(other, own, longest, "long-key")

            with ThreadPoolExecutor(6) as threads:
                sent = [threads.submit(send, seed) for seed in range(6)]
                time.sleep(2)
                try:
                    for n in num_words:
                        together = median(http, rng, n, rounds)
                        print(f"| {n} words | {alone[n]:.3f} s | {together:.3f} s | {together / alone[n]:.2f} |")
                finally:
                    done.set()
            for one in sent:
                one.result()


def median(http: httpx.Client, rng: random.Random, num_words: int, rounds: int) -> float:
    return statistics.median(first_token(http, rng, num_words, "other-key") for _ in range(rounds))


def next_to_batch(rounds: int) -> None:
    """Print times to first token without and with a running batch."""
    with clients(["--served-model-name", "m"]) as client, client() as http:
        rng, times = random.Random(0), {}
        first_token(http, rng, 50, "")
        times["alone"] = sorted(first_token(http, rng, 50, "") for _ in range(rounds))
        batch = f"/v1/batches/{start_batch(http)}"
        while not http.get(batch).json()["request_counts"]["completed"]:
            time.sleep(0.1)
        times["next to a batch"] = sorted(first_token(http, rng, 50, "") for _ in range(rounds))
        assert http.get(batch).json()["status"] == "in_progress", "the batch ended before the measurement"
        http.post(f"{batch}/cancel")
        for name, one in times.items():
            median, p90 = 1000 * statistics.median(one), 1000 * one[int(len(one) * 0.9)]
            print(f"{name}: median {median:.1f} ms, p90 {p90:.1f} ms, worst {1000 * one[-1]:.1f} ms")


def start_batch(http: httpx.Client, count: int = 1000) -> str:
    """Return the id of a new batch of chat requests with 200 output tokens each."""
    path, lines = "/v1/chat/completions", []
    for i in range(count):
        messages = [{"role": "user", "content": f"{i} " + "word " * (20 + i % 200)}]
        body = {"messages": messages, "max_tokens": 200, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": body}))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("batch.jsonl", "\n".join(lines))}).json()
    batch = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    return http.post("/v1/batches", json=batch).raise_for_status().json()["id"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", action="store_true", help="also in time")
    parser.add_argument("--rounds", type=int, default=7, help="prompts of each length, of which the median counts")
    parser.add_argument("--batch", action="store_true", help="next to a batch")
    args = parser.parse_args(argv)
    if args.batch:
        next_to_batch(10 * args.rounds)
        return 0
    print("| prompt | alone | next to others | x |\n|---|---|---|---|")
    worst = 0.0
    for prompt in PROMPTS:
        alone, together = steps(0, prompt), steps(4, prompt)
        worst = max(worst, together / alone)
        print(f"| {prompt:,} tokens | {alone} steps | {together} steps | {together / alone:.2f} |", flush=True)
    print("| prompt | alone | next to others | x |\n|---|---|---|---|")
    for prompt in PROMPTS:
        alone, together = (until_first_token(count, prompt, PER_TOKEN, PER_STEP)[1] for count in (0, 4))
        print(f"| {prompt:,} tokens | {alone:.3f} s | {together:.3f} s | {together / alone:.2f} |", flush=True)
    if args.seconds:
        in_seconds((120, 400, 900), args.rounds)
    return int(worst > 1.5)


if __name__ == "__main__":
    sys.exit(main())
