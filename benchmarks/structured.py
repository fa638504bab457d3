"""Measures what a grammar costs a decode step: steps of requests with and without one, in turn, in this process.

    python benchmarks/structured.py [--requests 32] [--steps 60] [--threads N] [--temperature T] [--device cpu|cuda]
    python benchmarks/structured.py --schemas 5000

The model has the shapes of Qwen3-0.6B with random weights, and a vocabulary of 151,936 tokens out of the words of
Python's standard library. Prints the median step of both in milliseconds, and the time to fill the bitmasks of a step,
which runs beside the forward pass. With --schemas, no model runs: prints the resident memory of this process while that
many different schemas are compiled as the server and a worker compile them, with a few masks of each.
"""

from __future__ import annotations

import argparse
import json
import os
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

from quire.configs.config import Config
from quire.server.structured.compile_process import Compiler
from quire.server.structured.compile_process import Vocabulary as CompilerVocabulary
from quire.server.structured.structure import Structure
from quire.worker.messages import NewRequest, SamplingParams, StepInput, Vocabulary
from quire.worker.sampling.grammar import Tokens
from quire.worker.worker import Worker

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 151935,
    "torch_dtype": "bfloat16",
}
PROMPT, BLOCK = 128, 16
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
    """Bytes, then the most frequent words and punctuation, with and without a space before them."""
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


class Rows:
    """Requests in rows from `first` on, which decode step by step."""

    def __init__(self, worker: Worker, first: int, count: int, sampling: SamplingParams, room: int):
        self.worker, self.rows, self.num_computed = worker, list(range(first, first + count)), 0
        self.sampling, self.num_blocks = sampling, -(-(PROMPT + room) // BLOCK)

    def step(self, num_tokens: int = 1) -> float:
        """Seconds of the next step; the first one admits the requests."""
        new = [self._new(row) for row in self.rows] if not self.num_computed else []
        count = len(self.rows)
        step = StepInput(
            1, new, self.rows, [self.num_computed] * count, [num_tokens] * count, [[]] * count, list(range(count))
        )
        self.num_computed += num_tokens
        start = time.perf_counter()
        output = self.worker.execute(step).result()
        assert output.errors is None, output.errors
        return time.perf_counter() - start

    def _new(self, row: int) -> NewRequest:
        blocks = [1 + row * self.num_blocks + i for i in range(self.num_blocks)]
        prompt = [1000 + (row * 37 + i) % 1000 for i in range(PROMPT)]
        sampling = msgspec.structs.replace(self.sampling, seed=row)
        return NewRequest(row, prompt, PROMPT, [blocks], sampling)


def start_worker(args: argparse.Namespace) -> Worker:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        worker = Worker(
            Config.from_flat(
                model=folder,
                load_format="dummy",
                device=args.device,
                block_size=BLOCK,
                max_num_seqs=2 * args.requests,
                max_model_len=str(PROMPT + args.steps + BLOCK),
                num_gpu_blocks_override=2 + 2 * args.requests * (-(-(PROMPT + args.steps + 1) // BLOCK) + 1),
                max_num_batched_tokens=PROMPT * args.requests,
                num_threads=args.threads,
            )
        )
        worker.initialize(lambda phase, fraction: None)
    while worker.look_for_ops():
        time.sleep(0.5)
    return worker


def measure_memory(count: int) -> None:
    words = vocabulary()
    compiler = Compiler(CompilerVocabulary({}, words.eos_token_ids, len(words.tokens)))
    tokens = Tokens(msgspec.msgpack.encode(words), len(words.tokens))
    for i in range(count + 1):
        properties = {f"field {i} {j}": {"type": "string", "maxLength": 10 + i % 50 + j} for j in range(i % 20 + 1)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        matcher = tokens.matcher(compiler.compile(Structure(kind="json_schema", value=schema)).grammar)
        for token in b'{"field':
            tokens.fill([matcher])
            matcher.consume_token(token)
        if i % max(count // 10, 1) == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            print(f"{i:6} schemas: {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.1f} MiB resident", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--schemas", type=int)
    args = parser.parse_args()
    if args.schemas is not None:
        return measure_memory(args.schemas)
    worker, words = start_worker(args), vocabulary()
    eos = words.eos_token_ids
    answer = Compiler(CompilerVocabulary({}, eos, len(words.tokens))).compile(
        Structure(kind="json_schema", value=SCHEMA)
    )
    worker.set_vocabulary(msgspec.msgpack.encode(words))
    free = SamplingParams(max_tokens=4096, temperature=args.temperature, eos_token_ids=eos, ignore_eos=True)
    masked = msgspec.structs.replace(free, grammar=answer.grammar)
    both = [
        Rows(worker, i * args.requests, args.requests, sampling, args.steps + 1)
        for i, sampling in enumerate([free, masked])
    ]
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
        rows.step(PROMPT)
    seconds = [[rows.step() for rows in both] for _ in range(args.steps)]
    without, with_grammar = (median(times) * 1e3 for times in zip(*seconds))
    print(
        f"{args.requests} requests, {args.threads} threads, temperature {args.temperature}: "
        f"free {without:.2f} ms, masked {with_grammar:.2f} ms ({100 * (with_grammar / without - 1):+.1f} %), "
        f"bitmasks {median(filling[1:]) * 1e3:.2f} ms (most {max(filling[1:]) * 1e3:.2f})"
    )
    worker.shutdown()


if __name__ == "__main__":
    main()
