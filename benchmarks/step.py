"""Measures whole steps of a model in this process, without engine and HTTP, and the time that each native kernel takes
of them.

    python benchmarks/step.py MODEL [--loads 1x128 8x128 32x128 1024] [--rounds N] [--threads N] [--quantization
    int8|int4] [--temperature T] [--deterministic | --no-deterministic] [--in-turn] [--cpu-time] [--cpu-level LEVEL]
    [--kv-cache-dtype auto|int8|fp8]

A load is a prompt of that many tokens (`1024`), or requests x tokens of context that each decode one token (`32x128`).
Prints the median step in milliseconds, the share of each kernel, and the rest for Python and torch. All layers are
one native call; `--in-turn` has attention called from here, so that it is seen by itself. The KV cache holds random
numbers: memory that was never written would be read from one page of zeros.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.worker_steps import Rows, num_groups, start_worker
from quire.checkpoints.gguf.folder import gguf_folder
from quire.worker.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from quire.worker.attention.scaled import ScaledCache, as_bytes
from quire.worker.cache.allocation import attention_layers
from quire.worker.cpu.native import KERNELS
from quire.worker.messages import SamplingParams
from quire.worker.worker import Worker


class Timed:
    """Wraps the native library and adds up the time spent in each of its functions."""

    def __init__(self, lib: object, clock: Callable[[], float]) -> None:
        self._lib, self._clock = lib, clock
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable:
        function = getattr(self._lib, name)

        def timed(*args):
            start = self._clock()
            result = function(*args)
            self.seconds[label(name, args)] += self._clock() - start
            return result

        setattr(self, name, timed)
        return timed


class InTurn(AttentionBackend):
    """A backend without `native_requests`, which is therefore called layer by layer."""

    name = "in_turn"

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None

    def build(self, meta: AttentionMetadata) -> None:
        self.backend.build(meta)

    def write_kv(self, *args) -> None:
        self.backend.write_kv(*args)

    def forward(self, q: torch.Tensor, *args) -> torch.Tensor:
        return self.backend.forward(q, *args)


def label(name: str, args: tuple) -> str:
    """Return the shape of a product, the name of any other function."""
    return f"{args[8]} -> {args[7]}" if name.startswith("quire_gemm_run") else name.removeprefix("quire_")


def parse_load(text: str) -> tuple[int, int, int]:
    """Return (requests, tokens of context, tokens of this step)."""
    if "x" in text:
        requests, context = map(int, text.split("x"))
        return requests, context - 1, 1
    return 1, 0, int(text)


def fill_cache(worker: Worker) -> None:
    """Write random numbers to all keys and values."""
    for layer in attention_layers(worker.runner.model):
        for cache in (layer.k_cache, layer.v_cache):
            if isinstance(cache, ScaledCache):
                as_bytes(cache.values).random_(-100, 100)
                cache.scales.fill_(0.01)
            else:
                cache.uniform_(-1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--loads", nargs="+", default=["1x128", "8x128", "32x128", "256", "1024"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="as for `quire serve`")
    parser.add_argument("--in-turn", action="store_true", help="make a native call per layer and per attention")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's CPU time; use it with one thread")
    for flag in ("--cpu-level", "--cpu-activation-bits", "--kv-cache-dtype"):
        parser.add_argument(flag, default="auto", help="as for `quire serve`")
    args = parser.parse_args()
    loads = {load: parse_load(load) for load in args.loads}
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)  # read by the kernels when they are loaded
    if not KERNELS.load(background=False, level=args.cpu_level):
        parser.error(KERNELS.status)
    KERNELS.lib = timed = Timed(KERNELS.lib, clock)
    flags = {
        "model": gguf_folder(args.model) if args.model.endswith(".gguf") else args.model,
        "device": "cpu",
        "max_num_seqs": 64,
        "num_threads": args.threads,
        "max_num_batched_tokens": 2048,
        "quantization": args.quantization,
        "deterministic": args.deterministic,
        "cpu_level": args.cpu_level,
        "cpu_activation_bits": args.cpu_activation_bits,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    longest = max(2048, *(context + count for _, context, count in loads.values()))
    blocks = max(longest // 16 + 1, *(num * -(-(context + count) // 16) + 1 for num, context, count in loads.values()))
    num_blocks = max(256, blocks * num_groups(**flags))
    worker = start_worker(**flags, max_model_len=str(longest), num_gpu_blocks_override=num_blocks)
    fill_cache(worker)
    if args.in_turn:
        worker.runner.backend = InTurn(worker.runner.backend)
    sampling = SamplingParams(temperature=args.temperature)
    print(f"{KERNELS.status}, {args.threads} threads")
    for load, (number, context, count) in loads.items():
        rows = Rows(worker, 0, number, context + count, context, sampling=sampling)
        rows.run(count)
        totals, parts = [], defaultdict(list)
        for _ in range(args.rounds):
            timed.seconds.clear()
            totals.append(rows.run(count, clock))
            for name, seconds in timed.seconds.items():
                parts[name].append(seconds)
            parts["the rest"].append(totals[-1] - sum(timed.seconds.values()))
        shares = "  ".join(f"{name} {median(seconds) * 1e3:.2f}" for name, seconds in parts.items())
        print(f"{load}: {median(totals) * 1e3:.2f} ms (least {min(totals) * 1e3:.2f})  {shares}", flush=True)
    worker.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
