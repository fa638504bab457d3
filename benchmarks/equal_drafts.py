"""Whether texts and log-probabilities are equal, bit for bit, with and without drafts:
`python benchmarks/equal_drafts.py [--texts 16] [--seconds 900] [--methods suffix auto draft_model] [MODEL]`.

The grid is weights (bfloat16, int8, int4; of a GGUF file its own) x method x greedy or seeded x 1 or 8 streams, with
--deterministic. Drafts are forced (4 tokens); the model is its own draft model unless --draft names another. Without
MODEL the embedded model is used. Ends with status 1 if anything differs, and after --seconds with what was compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from itertools import product

import httpx

from quire.cli.bench.process import ServerProcess, free_port
from quire.configs.sources import EMBEDDED_MODEL

SUBJECTS = ("a river", "the number seven", "a list of fruit", "def read(path):", "two old friends", '{"key": "value",')
FORMS = (
    "Repeat three times and change one word: {0} and {0} and {0}. ",
    "Write about {0}. Then write about {0} again. ",
    "{0}\n{0}\n{0}\n",
    "Question: what is {0}? Answer: ",
)
KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.2}}


def prompt(number: int) -> str:
    form, subject = FORMS[number % len(FORMS)], SUBJECTS[number // len(FORMS) % len(SUBJECTS)]
    return f"{number}. " + form.format(subject)


async def answers(url: str, kind: str, streams: int, texts: int, max_tokens: int, speculation: bool) -> list:
    """(text, token log-probabilities, reason of the end) of `texts` requests, `streams` at a time."""
    turn = asyncio.Semaphore(streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(number: int) -> tuple:
            body = {"prompt": prompt(number), "max_tokens": max_tokens, "seed": number, "logprobs": 1} | KINDS[kind]
            async with turn:
                answer = await client.post("/v1/completions", json=body | {"speculation": speculation})
            (choice,) = answer.raise_for_status().json()["choices"]
            return choice["text"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]

        return await asyncio.gather(*map(one, range(texts)))


async def cells(args: argparse.Namespace, flags: list[str], method: str) -> tuple[int, int]:
    """(texts that differ, texts) of one server."""
    port, model = free_port(), args.model or str(EMBEDDED_MODEL)
    config = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config["model"] = args.draft or model
    command = [sys.executable, "-m", "quire", "serve", model, "--deterministic", *flags, "--port", str(port)]
    num_differing = num_texts = 0
    with ServerProcess([*command, "--speculative-config", json.dumps(config)], port) as server:
        await server.wait_for("/health")
        url = f"http://127.0.0.1:{port}"
        for kind, streams in product(KINDS, (1, 8)):
            plain, drafted = [
                await answers(url, kind, streams, args.texts, args.max_tokens, speculation)
                for speculation in (False, True)
            ]
            differing = sum(a != b for a, b in zip(plain, drafted))
            name = " ".join(flags) or "-"
            print(f"| {name} | {method} | {kind} | {streams} | {differing} of {args.texts} |", flush=True)
            num_differing, num_texts = num_differing + differing, num_texts + args.texts
        await asyncio.sleep(0.5)  # the engine sends its counts now and then
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            page = (await client.get("/metrics")).text
        accepted = [
            line for line in page.splitlines() if line.startswith("quire:spec_decode_num_accepted_tokens_total{")
        ]
        assert sum(float(line.split()[-1]) for line in accepted) > 0, "no draft was accepted: nothing was compared"
    return num_differing, num_texts


async def grid(args: argparse.Namespace) -> int:
    """Run the grid until it is done or time is up. Returns the exit status."""
    weights = (
        [[]] if (args.model or "").endswith(".gguf") else [[], ["--quantization", "int8"], ["--quantization", "int4"]]
    )
    end, differing, texts = time.monotonic() + args.seconds, 0, 0
    print("| weights | method | sampling | streams | texts that differ |\n|---|---|---|---|---|")
    for flags, method in product(weights, args.methods):
        if time.monotonic() > end:
            print(f"time is up before {' '.join(flags)} {method}")
            break
        more = await cells(args, [*flags, *(["--dtype", "bfloat16"] if not flags else [])], method)
        differing, texts = differing + more[0], texts + more[1]
    print(f"{differing} of {texts} texts differ")
    return int(differing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16, help="per cell")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=900.0, help="no server is started later than this")
    parser.add_argument("--methods", nargs="+", default=["suffix", "auto", "draft_model"])
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("model", nargs="?", help="folder or GGUF file")
    return asyncio.run(grid(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
