"""The weights of GGUF files as the layers load them: blocks, which stay as they are in the file."""

from __future__ import annotations

from typing import Any

import torch

from quire.checkpoints.gguf.header import BLOCKS
from quire.checkpoints.gguf.names import stack_of_tensor
from quire.worker.layers.linear import LinearMethod
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    FromCheckpoint,
    Piece,
    Scheme,
    Stored,
    unsupported,
)


class Blocks(Scheme):
    """One tensor of blocks `[out, in / values * bytes]`."""

    def __init__(self, kind: str):
        self.kind = kind
        self.columns = Axis(COLUMNS, *BLOCKS[kind])

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        return {"blocks": Stored("weight", (Axis(ROWS), self.columns), torch.uint8)}

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Rows | torch.Tensor:
        rows, (values, _) = Rows(tensors["blocks"], self.kind), BLOCKS[self.kind]
        if piece.columns[0] % values == 0 and piece.columns[1] % values == 0:
            return rows
        return self.columns.trim(piece, rows.dequantized(), 1)

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        values, size = BLOCKS[self.kind]
        return piece.rows[1] * piece.columns[1] // values * size


class GgufFormat(CheckpointFormat):
    """`quant_method` gguf, of the config.json that `checkpoints/gguf/folder.py` writes."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        if "types" not in config:
            unsupported("quant_method", "gguf", "the .gguf file itself as MODEL")
        self.types = config["types"]

    def scheme(self, name: str) -> Scheme | None:
        kind = self.types.get(f"{stack_of_tensor(name)}.weight")
        return Blocks(kind) if kind in BLOCK_TYPES else None

    def find(self, name: str) -> Scheme | None:
        return self.scheme(name)  # the reader gives tensors the decoder's names

    def embedding(self, prefix: str) -> LinearMethod | None:
        return FromCheckpoint(self) if self.scheme(prefix) else None
