"""Products with quantized weights on a GPU, next to the bfloat16 product of the same matrix: for gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.configs.gguf import BLOCKS
from quire.worker.layers.linear import ColumnParallelLinear, Linear, Shard
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_at_load import quantize
from quire.worker.layers.quantization.int_groups import Groups, give_groups

ROWS = (1, 8, 64, 1024)
GROUPS = {"int8": (8, 128), "int4": (4, 64)}
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def products(device: str, seconds: Callable[[Callable[[], Any], str], float]) -> dict[str, dict[str, Any]]:
    """For each kind of weight its bytes and the seconds of products with ROWS rows. The matrix is that of Llama 3.1
    8B's gate and up projections; on the CPU, where plain torch multiplies, a small one.
    """
    n, k, numbers = (28672, 4096, ROWS) if device == "cuda" else (64, 256, ROWS[:2])
    found = {}
    for name, layer in layers(n, k, device):
        times = {}
        for rows in numbers:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
            times[str(rows)] = seconds(lambda x=x, layer=layer: layer(x), device)
        found[name] = {"bytes": layer.method.num_bytes(layer), "seconds": times}
    return found


def layers(n: int, k: int, device: str):
    """(name, layer) of the same random weight in every form; of random blocks for those of GGUF files."""
    weight = torch.randn(n, k, device=device).to(torch.bfloat16)
    plain = _empty(n, k)
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    yield "bfloat16", plain
    for name, (bits, _) in GROUPS.items():
        layer = _empty(n, k)
        _use_kernels(layer, device)
        values, scales = quantize(weight, bits)
        give_groups(layer, Groups(values, scales, None, bits, GROUPS[name][1]), torch.bfloat16)
        yield f"{name} in groups of {GROUPS[name][1]}", layer
    for columns in (k, 128):
        layer = _empty(n, k)
        _use_kernels(layer, device)
        values, scales = weight.to(torch.float8_e4m3fn), torch.ones(n, k // columns, device=device)
        give_groups(layer, Groups(values, scales, None, 8, columns), torch.bfloat16)
        yield f"fp8, a scale per {'output' if columns == k else 'output and 128 columns'}", layer
    for kind in BLOCK_TYPES:
        layer = _empty(n, k)
        _use_kernels(layer, device)
        num_values, num_bytes = BLOCKS[kind]
        # scales of random bits may be infinite, which takes no longer
        blocks = torch.randint(0, 256, (n, k // num_values * num_bytes), dtype=torch.uint8, device=device)
        layer.method = PlainBlocks(layer, [Rows(blocks, kind)], torch.bfloat16)
        layer.method.finalize(layer)
        yield kind, layer


def _empty(n: int, k: int) -> Linear:
    with torch.device("meta"):
        return ColumnParallelLinear(k, [Shard("weight", n, 0, n)], False)


def _use_kernels(layer: Linear, device: str) -> None:
    layer.weight = None
    if device == "cuda":
        from quire.worker.cuda.install import TritonOps

        layer.use(TritonOps())


def rows_of_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: microseconds, and GB/s of the weight's bytes, for each number of rows."""
    numbers = list(next(iter(found.values()))["seconds"])
    lines = [
        f"| product, us (GB/s of the weight) | {' | '.join(f'rows: {rows}' for rows in numbers)} |",
        "|---" * (1 + len(numbers)) + "|",
    ]
    for name, kind in found.items():
        cells = [f"{s * 1e6:.0f} ({kind['bytes'] / s / 1e9:.0f})" for s in kind["seconds"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
