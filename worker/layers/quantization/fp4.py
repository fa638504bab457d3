"""Weights of 4-bit floats (e2m1) in blocks along the columns: MXFP4 with a power of two per 32, NVFP4 with an e4m3
scale per 16 and a scale per tensor.

Read in the layouts of compressed-tensors and modelopt. gpt-oss keeps only its experts in MXFP4 (`quant_method` mxfp4),
which `mxfp4_blocks` decodes.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.layers.linear import LinearMethod
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.int_groups import GROUP_SIZE, TABLE, Groups
from quire.worker.layers.quantization.mxfp4_experts import Mxfp4Expert, mxfp4_rows
from quire.worker.layers.quantization.packing import E2M1_TABLE, e2m1_doubled, e8m0, nibbles
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    Piece,
    Scheme,
    Stored,
    grouped,
)


class Mxfp4(Scheme):
    """Codes `[out, in / 2]`, low half first, and exponents `[out, in / 32]`."""

    GROUP = 32

    def __init__(self, codes: str = "weight_packed", exponents: str = "weight_scale"):
        self.codes, self.exponents = codes, exponents

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        return {
            "codes": Stored(self.codes, (Axis(ROWS), Axis(COLUMNS, 32, 16)), torch.uint8, ("U8", "I8")),
            "exponents": Stored(self.exponents, (Axis(ROWS), Axis(COLUMNS, 32)), torch.uint8, ("U8", "F8_E8M0")),
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Rows | torch.Tensor:
        codes, exponents = tensors["codes"], tensors["exponents"]
        rows = mxfp4_rows(codes.view(len(codes), -1, self.GROUP // 2), exponents)
        if piece.columns[0] % self.GROUP == piece.columns[1] % self.GROUP == 0:
            return rows
        return Axis(COLUMNS, 32).trim(piece, rows.dequantized(), 1)

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        n, k = piece.size
        return n * k // self.GROUP * (self.GROUP // 2 + 1)


class Nvfp4(Scheme):
    """Codes `[out, in / 2]`, low half first, e4m3 scales `[out, in / 16]`, and a scale of the whole tensor by which
    they are multiplied or, with `divide`, divided.
    """

    GROUP = 16

    def __init__(self, codes: str, scales: str, scale: str, divide: bool):
        self.names, self.divide = (codes, scales, scale), divide

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        codes, scales, scale = self.names
        return {
            "codes": Stored(codes, (Axis(ROWS), Axis(COLUMNS, 16, 8)), torch.uint8),
            "scales": Stored(scales, (Axis(ROWS), Axis(COLUMNS, 16)), torch.float8_e4m3fn),
            "scale": Stored(scale, (1,), torch.float32),
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        codes = Axis(COLUMNS, self.GROUP).trim(piece, nibbles(tensors["codes"]), 1)
        scale = tensors["scale"].double()  # so that a product with its reciprocal rounds to float32 like the quotient
        row_scales = (1 / scale if self.divide else scale).repeat(piece.rows[1])
        return grouped(
            piece, codes.to(torch.int8) - 8, tensors["scales"].clone(), None, 4, self.GROUP,
            table=E2M1_TABLE, row_scales=row_scales,
        )  # fmt: skip

    def needs(self, piece: Piece) -> frozenset[str]:
        return frozenset({TABLE, GROUP_SIZE})

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        n, k = piece.size
        return n * k // 2 + n * -(-k // self.GROUP) + 4 * n


class Mxfp4Format(CheckpointFormat):
    """`quant_method` mxfp4 (gpt-oss): only experts are quantized."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()

    def scheme(self, name: str) -> Scheme | None:
        return None

    def linear(self, prefix: str) -> LinearMethod:
        return Mxfp4Expert() if ".experts." in prefix else super().linear(prefix)


def mxfp4_blocks(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Dequantize blocks uint8 `[..., groups, 16]` and exponents `[..., groups]`: float32 `[..., 32 * groups]`."""
    return (e2m1_doubled(nibbles(blocks)) * (e8m0(exponents) / 2).unsqueeze(-1)).flatten(-2)
