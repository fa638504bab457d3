"""Compares the native CPU kernels with torch's for the same work, in turn on one machine: times drift, ratios are
stable.

    python benchmarks/kernels.py [gemm] [quant] [stored] [attention] [shared] [small] [--threads N] [--rounds N]
                                 [--cpu-time]

Weights and caches rotate, so that nothing stays in cache. Each line gives the least time of the native kernel and how
many times as fast as each alternative it is; `GB/s` counts the weight or KV bytes that must be read, `TFLOP/s` the
useful arithmetic. On a busy machine use one thread and --cpu-time, which counts the CPU time of this process only.
"""

# ruff: noqa: B023  the lambdas run within their turn of the loop
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cpu import native_linear
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.native import KERNELS
from quire.worker.host import huge_pages
from quire.worker.platforms.ops import Ops

SHAPES = {  # model -> (outputs, inputs) of its matrices
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "Llama-3.2-1B": [(3072, 2048), (16384, 2048), (2048, 8192)],
    "Qwen3-4B": [(6144, 2560), (19456, 2560), (2560, 9728)],
}


class Race:
    """Runs alternatives in turn and keeps the shortest time of each."""

    def __init__(self, rounds: int, clock: Callable[[], float]) -> None:
        self.rounds, self.clock = rounds, clock

    def run(
        self, title: str, ways: dict[str, Callable[[], object]], repeats: int, num_bytes: float, flops: float
    ) -> None:
        """Print the time per unit of work of "native", and the other `ways` next to it. One call does `repeats` units,
        each of which reads `num_bytes` and computes `flops`.
        """
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(self.rounds):
            for name, way in ways.items():
                start = self.clock()
                way()
                best[name] = min(best[name], (self.clock() - start) / repeats)
        native = best.pop("native")
        rates = f"{num_bytes / native / 1e9:5.1f} GB/s  {flops / native / 1e12:5.2f} TFLOP/s"
        ratios = "  ".join(f"{seconds / native:5.2f} x {name}" for name, seconds in best.items())
        print(f"{title:44s} {native * 1e6:9.0f} us  {rates}  {ratios}", flush=True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _weights(n: int, k: int, least: int) -> list[torch.Tensor]:
    """Return matrices that do not fit into the cache together."""
    return [torch.randn(n, k).mul_(0.02).bfloat16() for _ in range(max(least, min(24, int(150e6 / (n * k)))))]


def prepacked_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return oneDNN's product with a weight that `_reorder_linear_weight` packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def gemm(race: Race) -> None:
    for model, shapes in SHAPES.items():
        for n, k in shapes:
            weights = _weights(n, k, 2)
            packed = [native_linear.PackedLinear(weight) for weight in weights]
            for m in (1, 4, 16, 32, 64, 256, 1024):
                if m * n > 2e7:
                    continue
                x, some = randn(m, k), max(2, len(weights) // (1 if m <= 64 else 6))
                onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, m) for weight in weights[:some]]
                ways = {
                    "native": lambda: [linear(x) for linear in packed[:some]],
                    "F.linear": lambda: [F.linear(x, weight) for weight in weights[:some]],
                    "oneDNN prepacked": lambda: [prepacked_linear(x, weight) for weight in onednn],
                }
                race.run(f"{model} {n} x {k}, {m} rows", ways, some, 2 * n * k, 2 * m * n * k)


def quant(race: Race) -> None:
    for n, k in ((6144, 1024), (1024, 3072), (2560, 9728)):
        weights = _weights(n, k, 4)
        packed = [native_linear.PackedLinear(weight) for weight in weights]
        for bits, group in ((8, 128), (4, 32), (4, 64), (4, 128)):
            linears = [native_linear.QuantizedLinear.quantize(weight, bits, group) for weight in weights]
            for m in (1, 4, 8, 16, 32, 64, 256):
                x, title = randn(m, k), f"{n} x {k}, {bits} bits by {group}, {m} rows"
                ways = {
                    "native": lambda: [linear(x) for linear in linears],
                    "native bf16": lambda: [linear(x) for linear in packed],
                }
                race.run(title, ways, len(weights), n * k * (bits / 8 + 2 / group), 2 * m * n * k)


def stored(race: Race) -> None:
    """Measure weights as checkpoints store them: blocks of GGUF files (random bytes) and 8-bit floats by 128."""
    n, k, count = 4096, 2560, 12
    for kind in (*native_linear.PACKED_BLOCKS, "e4m3"):
        if kind == "e4m3":
            values, scales = torch.randn(n, k).mul(100).to(torch.float8_e4m3fn), torch.rand(n, k // 128)
            linears = [native_linear.QuantizedLinear.from_values(values, scales, None, 8, 128) for _ in range(count)]
        else:
            per_block, size = BLOCKS[kind]
            blocks = torch.randint(256, (n, k // per_block * size), dtype=torch.uint8)
            linears = [native_linear.QuantizedLinear.from_blocks([blocks], kind, (n, k)) for _ in range(count)]
        for m in (1, 2, 4, 8, 16, 32, 128, 512):
            some = linears if m <= 32 else linears[:2]
            x, ways = randn(m, k), {"native": lambda: [linear(x) for linear in some]}
            parts = linears[0].packed, linears[0].scales, linears[0].offsets
            weight_bytes = sum(part.nbytes for part in parts if part is not None)
            race.run(f"{n} x {k}, {kind}, {m} rows", ways, len(some), weight_bytes, 2 * m * n * k)


def _cache(blocks: int, kv_heads: int) -> torch.Tensor:
    return huge_pages.zeros(blocks, 16, kv_heads, 128, dtype=torch.bfloat16).normal_()


def attention(race: Race) -> None:
    twin = CpuPagedAttention()
    cases = {
        "decode 1 x 2000": ([1], [2000]),
        "decode 8 x 500": ([1] * 8, [500] * 8),
        "decode 32 x 200": ([1] * 32, [200] * 32),
        "prefill 128": ([128], [0]),
        "prefill 1024": ([1024], [0]),
        "chunk of 512 after 1536": ([512], [1536]),
        "256 new + 16 x 300": ([256] + [1] * 16, [0] + [300] * 16),
    }
    for heads, kv_heads in ((16, 8), (32, 8)):
        for title, (queries, contexts) in cases.items():
            lengths = [q + c for q, c in zip(queries, contexts)]
            blocks = sum(-(-length // 16) for length in lengths) + 1
            caches = [[_cache(blocks, kv_heads) for _ in range(2)] for _ in range(6)]
            table = torch.zeros(len(lengths), -(-max(lengths) // 16), dtype=torch.int32)
            free = (torch.randperm(blocks - 1) + 1).int()
            for i, length in enumerate(lengths):
                number = -(-length // 16)
                table[i, :number], free = free[:number], free[number:]
            q, starts = randn(sum(queries), heads, 128), torch.tensor([0, *queries]).cumsum(0).int()
            seq_lens = torch.tensor(lengths).int()
            meta = AttentionMetadata(twin, torch.empty(0), starts, seq_lens, table, max(queries), max(lengths))

            def native():
                for k, v in caches:
                    cpu_ops.paged_attention(q, k, v, table, seq_lens, starts, 128**-0.5)

            def plain():
                twin.build(meta)
                for k, v in caches:
                    twin.forward(q, k, v, meta, 128**-0.5)

            flops = sum(4 * heads * 128 * (n * c + n * n / 2) for n, c in zip(queries, contexts))
            ways = {"native": native, "torch": plain}
            num_bytes = sum(lengths) * kv_heads * 128 * 4
            race.run(f"{heads}/{kv_heads} heads, {title}", ways, len(caches), num_bytes, flops)


def shared(race: Race) -> None:
    """Compare requests whose block tables begin with the same blocks with the same call on a copy for each request."""
    for heads, kv_heads in ((16, 8), (32, 8)):
        for title, (count, query_len, length, prefix) in {
            "decode 32 x 960": (32, 1, 960, 900),
            "decode 8 x 500": (8, 1, 500, 400),
            "32 new of 960, 8 requests": (8, 32, 960, 900),
        }.items():
            per_request = -(-length // 16)
            caches = [[_cache(count * per_request, kv_heads) for _ in range(2)] for _ in range(2)]
            private = torch.randperm(count * per_request).int().view(count, per_request)
            common = private.clone()
            common[:, : prefix // 16] = private[0, : prefix // 16]
            q, starts = randn(count * query_len, heads, 128), torch.arange(count + 1).int() * query_len
            seq_lens = torch.full((count,), length).int()

            def run(table, path):
                for k, v in caches:
                    cpu_ops.paged_attention(q, k, v, table, seq_lens, starts, 128**-0.5, path=path)

            ways = {
                "native": lambda: run(common, 0),
                "own copies": lambda: run(private, 0),
                "--deterministic": lambda: run(common, 2),
                "its own copies": lambda: run(private, 2),
            }
            read = (prefix // 16 * 16 + count * (length - prefix // 16 * 16)) * kv_heads * 128 * 4
            flops = 4 * heads * 128 * count * query_len * length
            race.run(f"{heads}/{kv_heads} heads, {title}, {prefix} shared", ways, len(caches), read, flops)


def small(race: Race) -> None:
    for rows in (1, 32, 1024):
        x, residual, weight, gate_up = randn(rows, 1024), randn(rows, 1024), randn(1024), randn(rows, 6144)
        qkv, q_weight, table, positions = randn(rows, 4096), randn(128), torch.randn(2048, 128), torch.arange(rows)
        caches = [torch.empty(rows // 16 + 1, 16, 8, 128).bfloat16() for _ in range(2)]
        arguments = (q_weight, q_weight, 1e-6, table, positions, *caches, positions, 16)
        for title, call, size in (
            ("add_rms_norm", lambda o: o.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
            ("silu_and_mul", lambda o: o.silu_and_mul(gate_up), 1.5 * gate_up.nbytes),
            ("qk_norm_rope_write", lambda o: o.qk_norm_rope_write(qkv, *arguments), 2 * qkv.nbytes),
        ):
            ways = {
                "native": lambda: [call(cpu_ops) for _ in range(50)],
                "torch": lambda: [call(Ops()) for _ in range(50)],
            }
            race.run(f"{title}, {rows} rows", ways, 50, size, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"gemm": gemm, "quant": quant, "stored": stored, "attention": attention, "shared": shared, "small": small}
    parser.add_argument("what", nargs="*", choices=[[], *parts], default=[], help="kernels to measure (default: all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cpu-time", action="store_true", help="count this process's CPU time; use it with one thread")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not KERNELS.load(background=False):
        parser.error(KERNELS.status)
    print(f"{KERNELS.status}, {args.threads} threads")
    race = Race(args.rounds, time.thread_time if args.cpu_time else time.perf_counter)
    with torch.inference_mode():
        for name in args.what or parts:
            parts[name](race)
    return 0


if __name__ == "__main__":
    sys.exit(main())
