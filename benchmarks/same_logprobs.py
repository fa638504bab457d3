"""Compares the log-probabilities that two running servers give to the tokens of random prompts.

    python benchmarks/same_logprobs.py URL_A URL_B [--vocabulary 1000] [--prompts 8] [--length 32]

Both must serve the same weights, with a vocabulary of at least so many tokens. `prompt_logprobs` of /v1/completions is
vLLM's, which quire has too. What servers round differently (activations in 8 bits, say) shows; so does, by far more, a
format that one of them reads wrongly. Compare them with bfloat16 weights first.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request


def post(url: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def answer(url: str, model: str, prompt: list[int]) -> tuple[list[float], list[str]]:
    """(log-probabilities of the prompt's tokens but the first, 16 greedy tokens)."""
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    choice = post(url, body | {"prompt_logprobs": 1, "logprobs": 1})["choices"][0]
    given = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:])]
    return given, choice["logprobs"]["tokens"]


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=30) as response:
        return json.load(response)["data"][0]["id"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()
    rng = random.Random(0)
    models = [model_of(url) for url in args.urls]
    differences, same, total = [], 0, 0
    for _ in range(args.prompts):
        prompt = [rng.randrange(5, args.vocabulary) for _ in range(args.length)]
        (a, tokens), (b, others) = (answer(url, model, prompt) for url, model in zip(args.urls, models))
        differences += [abs(x - y) for x, y in zip(a, b, strict=True)]
        total += len(tokens)
        for mine, theirs in zip(tokens, others):
            if mine != theirs:
                break
            same += 1
    mean = sum(differences) / len(differences)
    print(
        f"log-probabilities of {len(differences)} tokens: mean difference {mean:.4f}, largest {max(differences):.3f}; "
        f"{same} of {total} greedy tokens come before the first different one"
    )


if __name__ == "__main__":
    main()
