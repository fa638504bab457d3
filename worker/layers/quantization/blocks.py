"""Weights of GGUF files, multiplied in the file's blocks.

`PlainBlocks` dequantizes them for every product; a platform's native method (`Ops.blocks_method`) multiplies them as
they are. Weights that a layer fuses may have blocks of several types: each is a `Rows` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.layers.linear import Linear, PlainLinear, product
from quire.worker.layers.quantization.gguf_blocks import dequantize

_PIECE = 1 << 22  # weights dequantized at once


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a weight in blocks of one type: uint8 `[n, bytes]`."""

    blocks: torch.Tensor
    type: str

    def dequantized(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Rows of the weight in float32."""
        return dequantize(self.blocks[rows], self.type)

    def of_rows(self, rows: torch.Tensor) -> Rows:
        """The rows with the indices `rows`."""
        return Rows(self.blocks[rows], self.type)


class PlainBlocks(PlainLinear):
    """Holds the rows of a layer, one after another."""

    def __init__(self, layer: Linear, parts: list[Rows], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype
        for i, part in enumerate(parts):
            layer.register_buffer(f"blocks_{i}", part.blocks, persistent=False)

    def num_bytes(self, layer: Linear) -> int:
        bias = 0 if layer.bias is None else layer.bias.nbytes
        return sum(part.blocks.nbytes for part in self.parts) + bias

    def finalize(self, layer: Linear) -> None:
        if layer.ops is None or self.dtype not in layer.ops.quantized_types:
            return
        if native := layer.ops.blocks_method(layer, self.parts):
            layer.method = native

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        step = max(1, _PIECE // layer.in_features)
        pieces = [
            product(x, part.dequantized(slice(i, i + step)).to(self.dtype))
            for part in self.parts
            for i in range(0, len(part.blocks), step)
        ]
        whole = torch.cat(pieces, -1)
        if whole.shape[-1] < layer.out_features:  # rows that pad the vocabulary
            whole = torch.nn.functional.pad(whole, (0, layer.out_features - whole.shape[-1]))
        return whole if layer.bias is None else whole + layer.bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the weight, for an embedding."""
        (part,) = self.parts
        return part.dequantized(ids).to(self.dtype)
