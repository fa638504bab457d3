"""Measures the cost of a grammar in a decode step: steps of requests with and without one, in turn, in this process.

    python benchmarks/structured.py [--requests 32] [--steps 60] [--threads N] [--temperature T] [--device cpu|cuda]

The model has the shapes of Qwen3-0.6B with random weights, and a vocabulary of 151,936 tokens out of the words of
Python's standard library. Prints the median step of both in milliseconds, and the time to fill the bitmasks of a step,
which overlaps with the forward pass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_models import MODELS
from benchmarks.worker_steps import BLOCK, Rows, start_worker
from quire.server.structured.compile_process import Compiler
from quire.server.structured.compile_process import Vocabulary as CompilerVocabulary
from quire.server.structured.structure import Structure
from quire.worker.messages import SamplingParams, Vocabulary
from quire.worker.worker import Worker

MODEL = MODELS["Qwen3-0.6B"] | {"hidden_act": "silu", "eos_token_id": 151935, "torch_dtype": "bfloat16"}
PROMPT = 128
# long answers with texts, numbers, choices and nested objects
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "editor", "reader"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "role", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100}


def vocabulary() -> Vocabulary:
    """Return bytes, then the most frequent words and punctuation, with and without a space before them."""
    size, eos = MODEL["vocab_size"], MODEL["eos_token_id"]
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        counts.update(re.findall(r" ?[A-Za-z_]+| ?[0-9]{1,3}|[^\w\s]{1,4}|\s{1,16}", path.read_text("utf-8", "ignore")))
        if len(counts) > 2 * size:
            break
    tokens = [bytes([byte]) for byte in range(256)]
    words = (word.encode() for word, _ in counts.most_common())
    tokens += [word for word in dict.fromkeys(words) if len(word) > 1][: eos - len(tokens)]
    return Vocabulary(tokens + [b""] * (size - len(tokens)), [eos], [eos])


def worker_of(args: argparse.Namespace) -> Worker:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        num_blocks = 2 + 2 * args.requests * (-(-(PROMPT + args.steps + 1) // BLOCK) + 1)
        return start_worker(
            model=folder, load_format="dummy", device=args.device, num_threads=args.threads,
            max_num_seqs=2 * args.requests, max_model_len=str(PROMPT + args.steps + BLOCK),
            num_gpu_blocks_override=num_blocks, max_num_batched_tokens=PROMPT * args.requests,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    worker, words = worker_of(args), vocabulary()
    eos = words.eos_token_ids
    compiler = Compiler(CompilerVocabulary({}, eos, len(words.tokens)))
    answer = compiler.compile(Structure(kind="json_schema", value=SCHEMA))
    worker.set_vocabulary(msgspec.msgpack.encode(words))
    free = SamplingParams(max_tokens=4096, temperature=args.temperature, eos_token_ids=eos, ignore_eos=True)
    masked = msgspec.structs.replace(free, grammar=answer.grammar)
    room, both = args.steps + 1, []
    for i, sampling in enumerate([free, masked]):
        first = i * args.requests
        block = 1 + first * -(-(PROMPT + room) // BLOCK)
        both.append(Rows(worker, first, args.requests, PROMPT, room=room, first_block=block, sampling=sampling))
    filling: list[float] = []
    grammars = worker.runner.sampler.grammars
    fill = grammars._fill

    def timed(*arguments):
        start = time.perf_counter()
        try:
            return fill(*arguments)
        finally:
            filling.append(time.perf_counter() - start)

    grammars._fill = timed
    for rows in both:
        rows.run(PROMPT, advance=True)
    seconds = [[rows.run(1, advance=True) for rows in both] for _ in range(args.steps)]
    without, with_grammar = (median(times) * 1e3 for times in zip(*seconds))
    print(
        f"{args.requests} requests, {args.threads} threads, temperature {args.temperature}: "
        f"free {without:.2f} ms, masked {with_grammar:.2f} ms ({100 * (with_grammar / without - 1):+.1f} %), "
        f"bitmasks {median(filling[1:]) * 1e3:.2f} ms (most {max(filling[1:]) * 1e3:.2f})"
    )
    worker.shutdown()


if __name__ == "__main__":
    main()
