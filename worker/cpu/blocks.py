"""The native products of weights in the blocks of GGUF files: of the common types packed anew (`packed_blocks`), of the
others as they are in the file.
"""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise

import torch

from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.ops import PACKED_BLOCKS, MixedLinear, QuantizedLinear
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.platforms.huge_pages import Workspace

# in the order of BlockType in csrc/blocks.h
_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)


def multiply(x: torch.Tensor, rows: Rows, out: torch.Tensor, bias: torch.Tensor | None = None, first: int = 0) -> None:
    """Write x W^T (+ bias) to the columns of `out` from `first` on: x `[T, k]` bfloat16, W `[n, k]`, bias `[n]`
    float32, out `[T, columns]` bfloat16 or float32.
    """
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and out.stride(1) == 1 and rows.blocks.is_contiguous()
    n, row_bytes = rows.blocks.shape
    KERNELS.lib.quire_blocks_run(
        x.data_ptr(),
        x.stride(0),
        rows.blocks.data_ptr(),
        row_bytes,
        _TYPES.index(rows.type),
        None if bias is None else bias.data_ptr(),
        out.data_ptr() + first * out.element_size(),
        out.stride(0),
        len(x),
        n,
        x.shape[1],
        out.dtype == torch.float32,
    )


def take_rows(rows: Rows, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Rows `ids` `[T]` of the weight `[n, k]`: bfloat16 `[T, k]`."""
    ids, out = ids.long().contiguous(), torch.empty(len(ids), k, dtype=torch.bfloat16)
    blocks = rows.blocks
    KERNELS.lib.quire_blocks_rows(
        blocks.data_ptr(), blocks.shape[1], _TYPES.index(rows.type), ids.data_ptr(), len(ids), out.data_ptr(), k
    )
    return out


def packed_blocks(layer: Linear, parts: list[Rows]) -> QuantizedLinear | MixedLinear | None:
    """The layer's weight, packed in the same number of bits, or None if there is no kernel for a type of its blocks."""
    runs = [(kind, [part.blocks for part in same]) for kind, same in groupby(parts, lambda part: part.type)]
    if any(kind not in PACKED_BLOCKS for kind, _ in runs):
        return None
    if len(runs) == 1:
        shape = layer.out_features, layer.in_features
        return QuantizedLinear.from_blocks(runs[0][1], runs[0][0], shape, layer.bias, layer.gated)
    counts = [sum(len(blocks) for blocks in run) for _, run in runs]
    if layer.gated or sum(counts) < layer.out_features:
        return None
    starts = [0, *accumulate(counts)]
    biases = [None if layer.bias is None else layer.bias[a:b] for a, b in pairwise(starts)]
    return MixedLinear([
        QuantizedLinear.from_blocks(run, kind, (count, layer.in_features), bias)
        for (kind, run), count, bias in zip(runs, counts, biases)
    ])  # fmt: skip


class NativeBlocksMethod(LinearMethod):
    """Multiplies by each part of a fused weight, whose blocks stay where they are, e.g. in the mapped file."""

    fixed_order = True

    def __init__(self, layer: Linear, parts: list[Rows]):
        self.parts, self.in_features = parts, layer.in_features
        starts = [sum(len(part.blocks) for part in parts[:i]) for i in range(len(parts) + 1)]
        self.starts, self.padded = starts[:-1], starts[-1] < layer.out_features
        wide = None if layer.bias is None else layer.bias.float()
        self.biases = [None if wide is None else wide[a:b].contiguous() for a, b in pairwise(starts)]

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, torch.empty(len(x), layer.out_features, dtype=x.dtype))

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        shape = len(x), layer.out_features
        return self._multiply(x, torch.empty(shape) if workspace is None else workspace.take(*shape))

    def num_bytes(self, layer: Linear) -> int:
        return sum(part.blocks.nbytes for part in self.parts)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the weight, for an embedding."""
        return take_rows(self.parts[0], ids, self.in_features)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.padded:
            out.zero_()
        x = x if x.stride(1) == 1 else x.contiguous()
        for part, start, bias in zip(self.parts, self.starts, self.biases):
            multiply(x, part, out, bias, start)
        return out
