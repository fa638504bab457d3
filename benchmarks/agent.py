"""Measures an agent's turn after each kind of pause:
`python -m benchmarks.agent [--tokens 8000] MODEL [flags of quire serve]`.

A conversation of `--tokens` tokens comes back with another last message: at once (the edit of a turn), after other
traffic of three times the KV cache (a pause for tools), after kill -9 of the engine, and after a restart of the server.
Reports the time to the first token, its ratio to that of a server without prefix caching, how many tokens were cached,
and whether the greedy text is that server's. The KV cache has room for one and a half conversations; `--kv-offload-gib`
and `--kv-disk` are on. Prompts are random token ids, so that `--load-format dummy` works, too.

A cached prompt is computed in steps of other shapes, which changes the last bits in bfloat16 and so some texts: give
`--deterministic`, or `--dtype float32` where that is refused.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from benchmarks.server import READY_TIMEOUT, Server, serving, until

BLOCK = 16
TAIL = 64  # tokens of the last message, which differs in each turn
MAX_TOKENS = 16
OUTPUT = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
QUIET = 6.0  # seconds in which a quiet server writes to disk
PAUSES = ("edit of the last turn", "traffic of three pools", "kill -9 of the engine", "restart of the server")


@dataclass
class Answer:
    seconds: float  # to the first token
    token_ids: list[int]
    num_cached: int


def ask(server: Server, prompt: list[int]) -> Answer:
    """Stream the answer to `prompt`."""
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | OUTPUT
    started, first, ids, cached = time.perf_counter(), 0.0, [], 0
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=READY_TIMEOUT, trust_env=False) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and (new := event["choices"][0].get("token_ids")):
                first = first or time.perf_counter() - started
                ids += new
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first, ids, cached)


def kill_engine(server: Server) -> None:
    """Kill the engine and wait for its successor."""
    engine = server.engine()
    engine.kill()
    engine.wait(30)
    until(lambda: server.status() != 200, 30)  # the death is noticed
    server.wait_ready()


def turn(history: list[int], number: int, vocabulary: int) -> list[int]:
    """Return the conversation with another last message for each number."""
    chance = random.Random(number)
    return history + [chance.randrange(100, vocabulary) for _ in range(TAIL)]


def measure(args: argparse.Namespace, flags: list[str]) -> list[tuple[str, Answer, Answer]]:
    """Return (pause, answer, answer of a server without caching) per pause."""
    chance = random.Random(0)
    history = [chance.randrange(100, args.vocabulary) for _ in range(args.tokens - TAIL)]
    turns = [turn(history, number, args.vocabulary) for number in range(2 + len(PAUSES))]
    flags = [*flags, "--max-num-seqs", "2", "--num-gpu-blocks-override", str(3 * args.tokens // 2 // BLOCK + 8)]
    flags += ["--block-size", str(BLOCK), "--max-model-len", str(args.tokens + MAX_TOKENS + BLOCK)]
    with serving([args.model, *flags, "--no-enable-prefix-caching"]) as server:
        ask(server, turns[0])  # warm up
        expected = [ask(server, prompt) for prompt in turns[2:]]
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--kv-offload-gib", str(args.ram_gib), "--kv-disk", folder, "--kv-disk-gib", str(args.disk_gib)]
        found = []
        with serving([args.model, *flags]) as server:
            for prompt in turns[:2]:
                ask(server, prompt)
            found.append(ask(server, turns[2]))
            for _ in range(5):  # with nine tenths of a conversation each: three pools
                ask(server, [chance.randrange(100, args.vocabulary) for _ in range(9 * args.tokens // 10)])
            found.append(ask(server, turns[3]))
            time.sleep(QUIET)
            kill_engine(server)
            found.append(ask(server, turns[4]))
        with serving([args.model, *flags]) as server:
            found.append(ask(server, turns[5]))
    return list(zip(PAUSES, found, expected, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="of the conversation")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="token ids are below it")
    parser.add_argument("--ram-gib", type=float, default=4.0)
    parser.add_argument("--disk-gib", type=float, default=8.0)
    parser.add_argument("model")
    args, flags = parser.parse_known_args(argv)
    print("| pause | cached tokens | first token, s | without cache, s | ratio | same text |")
    print("|---|---|---|---|---|---|")
    for pause, answer, without in measure(args, flags):
        same = "yes" if answer.token_ids == without.token_ids else "no"
        ratio = answer.seconds / without.seconds
        times = f"{answer.seconds:.3f} | {without.seconds:.3f} | {ratio:.3f}"
        print(f"| {pause} | {answer.num_cached:,} | {times} | {same} |")


if __name__ == "__main__":
    main()
