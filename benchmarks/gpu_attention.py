"""Attention of steps of one token per request on a GPU: FlashAttention 3 and the Triton kernel, for gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.worker.attention.base import AttentionCall, AttentionMetadata, AttentionSpec
from quire.worker.cuda.flash_attn import FlashAttention3
from quire.worker.cuda.kernels import triton_paged

HEADS = ((32, 8, 128), (16, 8, 128), (32, 4, 128), (32, 32, 128), (64, 8, 128), (14, 2, 64), (32, 8, 64))
REQUESTS = ((1, 1154), (1, 16384), (8, 1154), (64, 1154), (256, 128), (256, 1086), (16, 16384))  # (number, tokens)
PAGE, TABLE = 16, 40960  # tokens; the table is as wide as that of a model with so many
CALLS = 10  # per recording


def decoding(seconds: Callable[[Callable[[], Any], str], float]) -> list[dict[str, Any]]:
    """Return microseconds and TB/s of both kernels; [] if FlashAttention 3 cannot be used."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, device, PAGE)
    if reason := FlashAttention3.supports(spec):
        print(f"attention is not measured: {reason}")
        return []
    rows = []
    for heads in HEADS:
        for number, length in REQUESTS:
            num_bytes = 4 * number * length * heads[1] * heads[2]
            if num_bytes < 6e9:
                rows.append({"heads": heads, "requests": number, "tokens": length, "bytes": num_bytes})
                rows[-1] |= _measure(heads, number, length, seconds)
                print(rows[-1], flush=True)
    return rows


def _measure(heads: tuple[int, int, int], number: int, length: int, seconds) -> dict[str, float]:
    num_heads, kv_heads, dim = heads
    pages = -(-length // PAGE)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    k, v = (torch.randn(pages * number + 1, PAGE, kv_heads, dim, **options) for _ in range(2))
    table = torch.zeros(number, TABLE // PAGE, dtype=torch.int32, device="cuda")
    table[:, :pages] = (torch.randperm(pages * number, device="cuda") + 1).view(number, pages)
    starts = torch.arange(number + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((number,), length, dtype=torch.int32, device="cuda")
    backend = FlashAttention3()
    slots = torch.zeros(number, dtype=torch.int64, device="cuda")
    meta = AttentionMetadata(backend, slots, starts, lengths, table, 1, TABLE)
    backend.build(meta)
    call = AttentionCall(torch.randn(number, num_heads, dim, **options), k, v, meta, dim**-0.5)
    ways = {"flash_attn_3": lambda: backend.library(call), "triton": lambda: triton_paged.attend(call)}
    return {name: seconds(_recorded(run), "cuda") / CALLS for name, run in ways.items()}


def _recorded(run: Callable[[], Any]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph.replay


def rows_of_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| heads | requests x tokens | FlashAttention 3, us | Triton, us | TB/s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        heads, kv_heads, dim = row["heads"]
        first, second = row["flash_attn_3"], row["triton"]
        lines.append(
            f"| {heads}/{kv_heads} x {dim} | {row['requests']} x {row['tokens']} | {1e6 * first:.1f} | "
            f"{1e6 * second:.1f} | {row['bytes'] / first / 1e12:.2f}, {row['bytes'] / second / 1e12:.2f} | "
            f"{first / second:.2f} |"
        )
    return lines
