"""Measures the experts of one layer of Qwen3-30B-A3B (128 experts, hidden size 2048, 768 wide, 8 per token) on the CPU
kernels: the rate at which the weights of the experts that have tokens are read, against plainly reading memory.

    python benchmarks/experts.py [--kinds bf16 int8 int4] [--tokens 1 8 32 512] [--rounds N] [--threads N]

Weights and routing are random; a round is 12 calls with different routing, so that no weight stays in cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.worker.cpu.experts import NativeExperts
from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from quire.worker.cpu.packed_linear import PackedMethod

EXPERTS, HIDDEN, SIZE, TOP_K = 128, 2048, 768, 8
CALLS = 12


class Layer:
    """Has a native product where `NativeExperts` looks for it."""

    def __init__(self, linear: PackedLinear | QuantizedLinear) -> None:
        self.method = PackedMethod.__new__(PackedMethod)
        self.method.linear = linear

    @property
    def num_bytes(self) -> int:
        linear = self.method.linear
        return linear.packed.nbytes + (linear.scales.nbytes if isinstance(linear, QuantizedLinear) else 0)


def make(kind: str, n: int, k: int, gated: str | None) -> Layer:
    if kind == "bf16":
        return Layer(PackedLinear(torch.randn(n, k).mul_(k**-0.5).bfloat16(), gated=gated))
    bits, group = (8, 128) if kind == "int8" else (4, 64)
    values = torch.randint(-(1 << bits - 1) + 1, 1 << bits - 1, (n, k), dtype=torch.int8)
    scales = torch.full((n, k // group), k**-0.5 / (1 << bits - 2))
    return Layer(QuantizedLinear.from_values(values, scales, None, bits, group, gated=gated))


def memory_rate(num_bytes: int = 1 << 30) -> float:
    """Bytes per second of summing a large tensor."""
    memory, times = torch.ones(num_bytes // 8, dtype=torch.int64), []
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - start)
    return num_bytes / min(times)


def measure(run: NativeExperts, bytes_of_expert: int, tokens: int, rounds: int) -> tuple[float, float]:
    """(seconds per call, bytes of experts that have tokens per call), medians over the rounds."""
    x, times, read = torch.randn(tokens, HIDDEN).bfloat16(), [], []
    for _ in range(rounds):
        routing = [torch.rand(tokens, EXPERTS).topk(TOP_K) for _ in range(CALLS)]
        start = time.perf_counter()
        for weights, ids in routing:
            run(x, weights, ids)
        times.append((time.perf_counter() - start) / CALLS)
        read.append(sum(ids.unique().numel() for _, ids in routing) / CALLS * bytes_of_expert)
    return median(times), median(read)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "int8", "int4"], choices=["bf16", "int8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)  # read by the kernels when they are loaded
    if not KERNELS.load(background=False):
        parser.error(KERNELS.status)
    print(f"{KERNELS.status}, {args.threads} threads, reading memory at {memory_rate() / 1e9:.1f} GB/s", flush=True)
    for kind in args.kinds:
        gate_up = [make(kind, 2 * SIZE, HIDDEN, "silu") for _ in range(EXPERTS)]
        down = [make(kind, HIDDEN, SIZE, None) for _ in range(EXPERTS)]
        run = NativeExperts.of(gate_up, down, 0, False)
        each = gate_up[0].num_bytes + down[0].num_bytes
        for tokens in args.tokens:
            seconds, read = measure(run, each, tokens, args.rounds if tokens < 128 else 1)
            rate = 6 * tokens * TOP_K * HIDDEN * SIZE / seconds
            print(
                f"{kind}, {tokens} tokens: {seconds * 1e3:.2f} ms, {read / 1e6:.0f} MB of experts at "
                f"{read / seconds / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
