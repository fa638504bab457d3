"""Weights of GGUF files, multiplied in the file's blocks.

`PlainBlocks` dequantizes them for every product, or once if the machine has memory to spare; a platform's native method
(`Ops.blocks_method`) multiplies them as they are. Weights that a layer fuses may have blocks of several types: each is
a `Rows` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from quire.worker.host import resources as host
from quire.worker.layers.linear import Linear, PlainLinear, product
from quire.worker.layers.onednn import Arranged
from quire.worker.layers.quantization.gguf_blocks import dequantize
from quire.worker.layers.quantization.torch_int4 import PackedNibbles, packed_rows

_PIECE = 1 << 22  # weights dequantized at once
_SPARE = 0.5  # share of the machine's memory that dequantized and packed weights leave available


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a weight in blocks of one type: uint8 `[n, bytes]`."""

    blocks: torch.Tensor
    type: str

    def dequantized(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Return rows of the weight in float32."""
        return dequantize(self.blocks[rows], self.type)

    def select_rows(self, rows: torch.Tensor) -> Rows:
        """Return the rows with the indices `rows`."""
        return Rows(self.blocks[rows], self.type)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A part of a weight, dequantized and, if torch has a product for it, packed."""

    whole: torch.Tensor | None  # None: packed and arranged
    packed: PackedNibbles | None
    arranged: Arranged | None

    @classmethod
    def of(cls, whole: torch.Tensor, packed: PackedNibbles | None) -> _Kept:
        arranged = Arranged.of(whole)
        return cls(None if packed and arranged else whole, packed, arranged)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x `[T, in_features]` times the weight."""
        if self.packed is not None and len(x) < packed_rows():
            return self.packed.product(x)
        return self.arranged.product(x) if self.arranged and len(x) > 1 else product(x, self.whole)


def _merged(parts: list[Rows]) -> Iterator[Rows]:
    """Yield `parts`, neighbours of one type as one: a product takes less time than several of its parts."""
    for kind, group in groupby(parts, key=lambda part: part.type):
        blocks = [part.blocks for part in group]
        yield Rows(blocks[0] if len(blocks) == 1 else torch.cat(blocks), kind)


class PlainBlocks(PlainLinear):
    """Holds the rows of a layer, one after another."""

    def __init__(self, layer: Linear, parts: list[Rows], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype
        self._kept: list[_Kept] | None = None
        self._may_keep = True
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
        if self._kept is None and self._may_keep:
            self._keep_weight(layer)
        if self._kept is not None:
            pieces = [kept.product(x) for kept in self._kept]
        else:
            pieces = [product(x, piece) for part in self.parts for piece in self._pieces(layer, part)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        if whole.shape[-1] < layer.out_features:  # rows that pad the vocabulary
            whole = torch.nn.functional.pad(whole, (0, layer.out_features - whole.shape[-1]))
        return whole if layer.bias is None else whole + layer.bias

    def dense_weight(self, layer: Linear) -> torch.Tensor | None:
        kept = self._kept[0] if self._kept and len(self._kept) == 1 else None
        return None if kept is None or kept.packed or len(kept.whole) < layer.out_features else kept.whole

    def _keep_weight(self, layer: Linear) -> None:
        """Dequantize and pack once if this is a CPU with memory to spare: it takes most of the time of a step with few
        rows. The native kernels, which need no such copies, replace this method and free them.
        """
        num_rows = sum(len(part.blocks) for part in self.parts)
        size, (total, available) = num_rows * layer.in_features * self.dtype.itemsize, host.memory()
        self._may_keep = self.parts[0].blocks.device.type == "cpu" and available - size >= _SPARE * total
        if self._may_keep:
            self._kept = [
                _Kept.of(self._whole(layer, part), PackedNibbles.from_blocks(part.blocks, part.type, self.dtype))
                for part in _merged(self.parts)
            ]

    def _whole(self, layer: Linear, part: Rows) -> torch.Tensor:
        """Return a part, dequantized."""
        weight, start = torch.empty(len(part.blocks), layer.in_features, dtype=self.dtype), 0
        for piece in self._pieces(layer, part):
            weight[start : start + len(piece)] = piece
            start += len(piece)
        return weight

    def _pieces(self, layer: Linear, part: Rows) -> Iterator[torch.Tensor]:
        """Yield a part, dequantized some rows at a time."""
        step = max(1, _PIECE // layer.in_features)
        for i in range(0, len(part.blocks), step):
            yield part.dequantized(slice(i, i + step)).to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the weight, for an embedding."""
        (part,) = self.parts
        return part.dequantized(ids).to(self.dtype)
