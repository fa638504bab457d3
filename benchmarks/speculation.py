"""Speculative decoding on text that repeats itself and on text that does not:
`python benchmarks/speculation.py [--streams 1 8] [--methods none auto ngram] -- MODEL [flags of quire serve]`.

Two loads: "repeat this code with one change", greedy, and prose at temperature 1, which cannot be predicted. Reports
output tokens per second, the gain over `none`, the acceptance rate, and how many answers differ from those of `none`
(none, where logits have the same bits with and without drafts).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time

import httpx

from quire.cli.bench.process import ServerProcess, free_port

CODE = '''def read_records(path, separator=","):
    """Read all records of a file as lists of fields."""
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fields = [field.strip() for field in line.split(separator)]
            if len(fields) < 2:
                raise ValueError(f"{path}:{number}: expected two fields")
            records.append(fields)
    return records


def write_records(path, records, separator=","):
    """Write records to a file, one per line."""
    with open(path, "w", encoding="utf-8") as file:
        for fields in records:
            file.write(separator.join(fields) + "\\n")
'''
EDIT = f"Repeat this code, but rename the variable `records` to `rows`. Reply with code only.\n\n```python\n{CODE}```"
LOADS = {
    "edit": (lambda i: EDIT + "\n" * i, {"temperature": 0}),
    "prose": (lambda i: f"Tell me an unusual story about the number {i}.", {"temperature": 1.0, "top_p": 1.0}),
}


async def run(url: str, load: str, streams: int, max_tokens: int) -> tuple[float, list[str]]:
    """(output tokens per second, texts) of `streams` requests at once."""
    prompt, sampling = LOADS[load]
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(i: int) -> tuple[int, str]:
            messages = [{"role": "user", "content": prompt(i)}]
            body = {"messages": messages, "max_tokens": max_tokens, "seed": i} | sampling
            answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]

        await one(0)  # the prompt is in the prefix cache then
        begin = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(streams)))
        elapsed = time.perf_counter() - begin
    return sum(count for count, _ in answers) / elapsed, [text for _, text in answers]


def acceptance(url: str) -> tuple[float, float]:
    """(draft tokens, accepted ones) so far."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    return tuple(
        float(re.search(rf"^quire:spec_decode_num_{name}_tokens_total{{.*}} (.*)$", page, re.MULTILINE)[1])
        for name in ("draft", "accepted")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--methods", nargs="+", default=["none", "auto", "ngram", "suffix"])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2, help="the best counts")
    parser.add_argument("model", nargs="+", help="and flags of quire serve")
    args = parser.parse_args()
    plain: dict[tuple[str, int], tuple[float, list[str]]] = {}
    print("| load | streams | method | tokens/s | gain | accepted | texts that differ |\n|---|---|---|---|---|---|---|")
    for method in args.methods:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = json.dumps({"method": method})
        command = [sys.executable, "-m", "quire", "serve", *args.model, "--speculative-config", config]
        with ServerProcess([*command, "--port", str(port)], port) as server:
            asyncio.run(server.wait_for("/health"))
            for load in args.loads:
                for streams in args.streams:
                    before = acceptance(url)
                    rate, texts = max(
                        asyncio.run(run(url, load, streams, args.max_tokens)) for _ in range(args.rounds)
                    )
                    drafted, accepted = (after - first for after, first in zip(acceptance(url), before))
                    base, expected = plain.setdefault((load, streams), (rate, texts))
                    differing = sum(a != b for a, b in zip(texts, expected))
                    share = f"{100 * accepted / drafted:.0f} % of {drafted:.0f}" if drafted else "-"
                    print(
                        f"| {load} | {streams} | {method} | {rate:.1f} | {rate / base:.2f} | {share} | {differing} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
