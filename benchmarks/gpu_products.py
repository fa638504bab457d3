"""Products with quantized weights on a GPU, next to the bfloat16 product of the same shape, dense and of the experts of
a layer: for gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Linear, Shard
from quire.worker.layers.moe import ListedExperts
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups, give_groups
from quire.worker.layers.quantization.packing import E2M1_TABLE
from quire.worker.spec.moe import MoESpec, RoutingSpec

ROWS = (1, 8, 64, 1024)
# for gpt-oss-20b and Qwen3-30B-A3B: experts, experts per token, hidden size, intermediate size, activation, biases
EXPERTS = {
    "gpt-oss-20b": (32, 4, 2880, 2880, "clamped_silu", True),
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "silu", False),
}
EXPERT_FORMS = ("bfloat16", "MXFP4", "NVFP4", "int4 in groups of 64", "fp8, a scale per output and 128 columns", "Q4_K")


def products(device: str, seconds: Callable[[Callable[[], Any], str], float]) -> dict[str, dict[str, Any]]:
    """Return for each kind of weight its bytes and the seconds of products with ROWS rows. The matrix is that of Llama
    3.1 8B's gate and up projections; on the CPU, where plain torch multiplies, everything is small.
    """
    n, k, numbers = (28672, 4096, ROWS) if device == "cuda" else (64, 256, ROWS[:2])
    found = {}
    for name, give in FORMS.items():
        layer = ColumnParallelLinear(k, [Shard("weight", n, 0, n)], False, _NoWeight())
        _give(layer, give, device)
        inputs = [(rows, (torch.randn(rows, k, dtype=torch.bfloat16, device=device),)) for rows in numbers]
        found[name] = _measure(layer, inputs, layer.method.num_bytes(layer), device, seconds)
    for model, sizes in EXPERTS.items():
        for name in EXPERT_FORMS:
            if name == "Q4_K" and (sizes[2] % 256 or sizes[3] % 256):
                continue
            found[f"experts of {model}, {name}"] = _measure_experts(name, sizes, numbers, device, seconds)
    return found


def _measure(run, inputs, num_bytes: int, device: str, seconds) -> dict[str, Any]:
    times = {str(rows): seconds(partial(run, *args), device) for rows, args in inputs}
    return {"bytes": num_bytes, "seconds": times}


def _measure_experts(name: str, sizes: tuple, numbers: tuple[int, ...], device: str, seconds) -> dict[str, Any]:
    """Return every token's experts are chosen at random. The bytes are those of all experts."""
    num, top_k, hidden, size, activation, biased = sizes if device == "cuda" else (4, 2, 256, 256, *sizes[4:])
    moe = MoESpec(RoutingSpec(num, top_k), size, activation=activation, bias=biased)
    with torch.device("meta"):
        experts = ListedExperts(hidden, moe, "experts", PLAIN_WEIGHTS)
    layers = [layer for one in experts.experts.values() for layer in (one.gate_up_proj, one.down_proj)]
    for layer in layers:
        if biased:
            layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features, dtype=torch.bfloat16, device=device))
        _give(layer, FORMS[name], device)
    num_bytes = sum(layer.method.num_bytes(layer) for layer in layers)
    if device == "cuda":
        experts.use(_kernels())
        assert experts.packed(), name
    inputs = []
    for rows in numbers:
        x, weights = (
            torch.randn(rows, hidden, dtype=torch.bfloat16, device=device),
            torch.rand(rows, num, device=device),
        )
        inputs.append((rows, (x, *weights.topk(top_k))))
    return _measure(experts, inputs, num_bytes, device, seconds)


class _NoWeight:
    """A placeholder for a method until `_give` gives the layer its weight."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = None


def _give(layer: Linear, give: Callable[[Linear, str], None], device: str) -> None:
    layer.weight = None
    if device == "cuda":
        layer.use(_kernels())
    give(layer, device)


def _kernels():
    from quire.worker.cuda.install import TritonOps

    return TritonOps()


def _plain(layer: Linear, device: str) -> None:
    weight = torch.randn(layer.out_features, layer.in_features, device=device).to(torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.method = PLAIN_WEIGHTS.linear("")


def _integers(bits: int, group: int, layer: Linear, device: str) -> None:
    n, k, most = layer.out_features, layer.in_features, 1 << (bits - 1)
    values = torch.randint(-most, most, (n, k), dtype=torch.int8, device=device)
    scales = torch.full((n, -(-k // group)), 1 / most, dtype=torch.bfloat16, device=device)
    give_groups(layer, Groups(values, scales, None, bits, group), torch.bfloat16)


def _floats8(group: int | None, layer: Linear, device: str) -> None:
    n, k = layer.out_features, layer.in_features
    values = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(n, 1 if group is None else -(-k // group), device=device)
    give_groups(layer, Groups(values, scales, None, 8, group or k), torch.bfloat16)


def _codes(kind: str, layer: Linear, device: str) -> None:
    n, k, row_scales = layer.out_features, layer.in_features, None
    group, table = (16, E2M1_TABLE) if kind == "NVFP4" else (64, tuple(i / 8 - 1 for i in range(16)))
    scales = torch.ones(n, -(-k // group), device=device)
    if kind == "NVFP4":
        scales, row_scales = scales.to(torch.float8_e4m3fn), torch.ones(n, dtype=torch.float64, device=device)
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
    give_groups(layer, Groups(values, scales, None, 4, group, None, table, row_scales), torch.bfloat16)


def _blocks(kind: str, layer: Linear, device: str) -> None:
    num_values, num_bytes = BLOCKS[kind]
    # scales of random bits may be infinite, which takes no longer
    shape = layer.out_features, layer.in_features // num_values * num_bytes
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    layer.method = PlainBlocks(layer, [Rows(blocks, kind)], torch.bfloat16)
    layer.method.finalize(layer)


FORMS: dict[str, Callable[[Linear, str], None]] = {
    "bfloat16": _plain,
    "int8 in groups of 128": partial(_integers, 8, 128),
    "int4 in groups of 64": partial(_integers, 4, 64),
    "fp8, a scale per output": partial(_floats8, None),
    "fp8, a scale per output and 128 columns": partial(_floats8, 128),
    "NVFP4": partial(_codes, "NVFP4"),
    "NF4": partial(_codes, "NF4"),
    **{kind: partial(_blocks, kind) for kind in ("MXFP4", "Q8_0", "Q4_0", "Q4_K", "Q6_K")},
}


def rows_of_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return Markdown: microseconds, and GB/s of the weight's bytes, for each number of rows."""
    numbers = list(next(iter(found.values()))["seconds"])
    lines = [
        f"| product, us (GB/s of the weight) | {' | '.join(f'rows: {rows}' for rows in numbers)} |",
        "|---" * (1 + len(numbers)) + "|",
    ]
    for name, kind in found.items():
        cells = [f"{s * 1e6:.0f} ({kind['bytes'] / s / 1e9:.0f})" for s in kind["seconds"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
