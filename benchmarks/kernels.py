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

    def run(self, ways: dict[str, Callable[[], None]], repeats: int = 1) -> dict[str, float]:
        """Return seconds per unit of work of each alternative; one call does `repeats` units."""
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(self.rounds):
            for name, way in ways.items():
                start = self.clock()
                way()
                best[name] = min(best[name], (self.clock() - start) / repeats)
        return best


def _print(title: str, times: dict[str, float], weight_bytes: float, flops: float) -> None:
    native = times.pop("native")
    ratios = "  ".join(f"{seconds / native:5.2f} x {name}" for name, seconds in times.items())
    print(
        (
            f"{title:44s} {native * 1e6:9.0f} us  {weight_bytes / native / 1e9:5.1f} GB/s  "
            f"{flops / native / 1e12:5.2f} TFLOP/s  {ratios}"
        ),
        flush=True,
    )


def prepacked_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """oneDNN's product with a weight that `_reorder_linear_weight` packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def gemm(race: Race) -> None:
    for model, shapes in SHAPES.items():
        for n, k in shapes:
            count = max(2, min(24, int(150e6 / (n * k))))
            weights = [torch.randn(n, k).mul_(0.02).bfloat16() for _ in range(count)]
            packed = [native_linear.PackedLinear(weight) for weight in weights]
            for m in (1, 4, 16, 32, 64, 256, 1024):
                if m * n > 2e7:
                    continue
                x, some = torch.randn(m, k).bfloat16(), max(2, count // (1 if m <= 64 else 6))
                onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, m) for weight in weights[:some]]
                times = race.run({
                    "native": lambda: [linear(x) for linear in packed[:some]],
                    "F.linear": lambda: [F.linear(x, weight) for weight in weights[:some]],
                    "oneDNN prepacked": lambda: [prepacked_linear(x, weight) for weight in onednn],
                }, some)  # fmt: skip
                _print(f"{model} {n} x {k}, {m} rows", times, 2 * n * k, 2 * m * n * k)


def quant(race: Race) -> None:
    for n, k in ((6144, 1024), (1024, 3072), (2560, 9728)):
        count = max(4, min(24, int(150e6 / (n * k))))
        weights = [torch.randn(n, k).mul_(0.02).bfloat16() for _ in range(count)]
        packed = [native_linear.PackedLinear(weight) for weight in weights]
        for bits, group in ((8, 128), (4, 32), (4, 64), (4, 128)):
            linears = [native_linear.QuantizedLinear.quantize(weight, bits, group) for weight in weights]
            for m in (1, 4, 8, 16, 32, 64, 256):
                x = torch.randn(m, k).bfloat16()
                times = race.run(
                    {
                        "native": lambda: [linear(x) for linear in linears],
                        "native bf16": lambda: [linear(x) for linear in packed],
                    },
                    count,
                )
                _print(
                    f"{n} x {k}, {bits} bits by {group}, {m} rows", times, n * k * (bits / 8 + 2 / group), 2 * m * n * k
                )


def stored(race: Race) -> None:
    """Weights as checkpoints store them: blocks of GGUF files (random bytes) and 8-bit floats by 128."""
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
            x = torch.randn(m, k).bfloat16()
            times = race.run({"native": lambda: [linear(x) for linear in some]}, len(some))
            parts = linears[0].packed, linears[0].scales, linears[0].offsets
            weight_bytes = sum(part.nbytes for part in parts if part is not None)
            _print(f"{n} x {k}, {kind}, {m} rows", times, weight_bytes, 2 * m * n * k)


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
            table, free = (
                torch.zeros(len(lengths), -(-max(lengths) // 16), dtype=torch.int32),
                (torch.randperm(blocks - 1) + 1).int(),
            )
            for i, length in enumerate(lengths):
                number = -(-length // 16)
                table[i, :number], free = free[:number], free[number:]
            q, starts, seq_lens = (
                torch.randn(sum(queries), heads, 128).bfloat16(),
                torch.tensor([0, *queries]).cumsum(0).int(),
                torch.tensor(lengths).int(),
            )

            def plain(
                caches=caches, q=q, starts=starts, seq_lens=seq_lens, table=table, queries=queries, lengths=lengths
            ):
                meta = AttentionMetadata(twin, torch.empty(0), starts, seq_lens, table, max(queries), max(lengths))
                twin.build(meta)
                for k, v in caches:
                    twin.forward(q, k, v, meta, 128**-0.5)

            times = race.run(
                {
                    "native": lambda: [
                        cpu_ops.paged_attention(q, k, v, table, seq_lens, starts, 128**-0.5) for k, v in caches
                    ],
                    "torch": plain,
                },
                len(caches),
            )
            flops = sum(4 * heads * 128 * (n * c + n * n / 2) for n, c in zip(queries, contexts))
            _print(f"{heads}/{kv_heads} heads, {title}", times, sum(lengths) * kv_heads * 128 * 4, flops)


def shared(race: Race) -> None:
    """Requests whose block tables begin with the same blocks, against the same call with a copy for each request."""
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
            q, starts, seq_lens = (
                torch.randn(count * query_len, heads, 128).bfloat16(),
                torch.arange(count + 1).int() * query_len,
                torch.full((count,), length).int(),
            )

            def run(table, path, caches=caches, q=q, starts=starts, seq_lens=seq_lens):
                for k, v in caches:
                    cpu_ops.paged_attention(q, k, v, table, seq_lens, starts, 128**-0.5, path=path)

            times = race.run(
                {
                    "native": lambda: run(common, 0),
                    "own copies": lambda: run(private, 0),
                    "--deterministic": lambda: run(common, 2),
                    "its own copies": lambda: run(private, 2),
                },
                len(caches),
            )
            read = (prefix // 16 * 16 + count * (length - prefix // 16 * 16)) * kv_heads * 128 * 4
            _print(
                f"{heads}/{kv_heads} heads, {title}, {prefix} shared",
                times,
                read,
                4 * heads * 128 * count * query_len * length,
            )


def small(race: Race) -> None:
    for rows in (1, 32, 1024):
        x, residual, weight = (
            torch.randn(rows, 1024).bfloat16(),
            torch.randn(rows, 1024).bfloat16(),
            torch.randn(1024).bfloat16(),
        )
        gate_up, qkv = torch.randn(rows, 6144).bfloat16(), torch.randn(rows, 4096).bfloat16()
        q_weight, table, positions = torch.randn(128).bfloat16(), torch.randn(2048, 128), torch.arange(rows)
        k_cache, v_cache = (
            torch.empty(rows // 16 + 1, 16, 8, 128).bfloat16(),
            torch.empty(rows // 16 + 1, 16, 8, 128).bfloat16(),
        )
        arguments = (q_weight, q_weight, 1e-6, table, positions, k_cache, v_cache, positions, 16)
        for title, call, size in (
            ("add_rms_norm", lambda o: o.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
            ("silu_and_mul", lambda o: o.silu_and_mul(gate_up), 1.5 * gate_up.nbytes),
            ("qk_norm_rope_write", lambda o: o.qk_norm_rope_write(qkv, *arguments), 2 * qkv.nbytes),
        ):
            times = race.run(
                {
                    "native": lambda: [call(cpu_ops) for _ in range(50)],
                    "torch": lambda: [call(Ops()) for _ in range(50)],
                },
                50,
            )
            _print(f"{title}, {rows} rows", times, size, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", help="kernels to measure: gemm, quant, stored, attention, shared, small (default: all)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the CPU time of this process only; use it with one thread"
    )
    args = parser.parse_args()
    parts = {"gemm": gemm, "quant": quant, "stored": stored, "attention": attention, "shared": shared, "small": small}
    if unknown := set(args.what) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
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
