"""Experts in MXFP4, as gpt-oss stores them: all experts of a layer in one tensor of blocks and one of exponents.

They are held as the blocks of GGUF files, 17 bytes for 32 weights, or in the same bits by a platform's method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.layers.linear import Linear, LinearMethod, empty_parameter
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups
from quire.worker.layers.quantization.packing import E2M1_TABLE, nibbles

GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Expert(LinearMethod):
    """A linear layer of one expert. `layers.moe` gives its parameters their parts: blocks uint8 `[n, k / 32, 16]`, low
    half first, and exponents uint8 `[n, k / 32]`.
    """

    def create_weights(self, layer: Linear) -> None:
        groups = layer.in_features // GROUP
        if layer.in_features % GROUP:
            raise ValueError(
                f"experts in MXFP4 with {layer.in_features} inputs per rank, which {GROUP} does not divide: give every "
                "rank whole experts with --enable-expert-parallel, or use another --tensor-parallel-size"
            )
        layer.blocks = empty_parameter(layer.out_features, groups, GROUP // 2, parts=[], dtype=torch.uint8)
        layer.exponents = empty_parameter(layer.out_features, groups, parts=[], dtype=torch.uint8)
        layer.dtype = torch.get_default_dtype()

    def num_bytes(self, layer: Linear) -> int:
        groups = layer.out_features * layer.in_features // GROUP
        return groups * (GROUP // 2 + 1) + (0 if layer.bias is None else layer.bias.nbytes)

    def finalize(self, layer: Linear) -> None:
        codes, exponents = layer.blocks.data, layer.exponents.data
        layer.blocks = layer.exponents = None
        rows = mxfp4_rows(codes, exponents)
        layer.method = PlainBlocks(layer, [rows], layer.dtype)
        layer.method.finalize(layer)


def mxfp4_rows(codes: torch.Tensor, exponents: torch.Tensor) -> Rows:
    """Return the rows whose codes are uint8 `[n, groups, 16]`, low half first, and whose exponents are `[n,
    groups]`.
    """
    values = nibbles(codes)
    halves = values[..., :16] | values[..., 16:] << 4
    return Rows(torch.cat([exponents.unsqueeze(-1), halves], -1).flatten(-2), "MXFP4")


def mxfp4_groups(rows: Rows) -> Groups:
    """Return the same numbers as groups: codes in a table with a power of two per 32."""
    blocks = rows.blocks.unflatten(1, (-1, GROUP // 2 + 1))
    exponents, halves = blocks[..., 0].contiguous(), blocks[..., 1:]
    codes = torch.cat([halves & 15, halves >> 4], -1).flatten(1)
    scales = exponents.view(torch.float8_e8m0fnu)
    return Groups(codes.to(torch.int8) - 8, scales, None, 4, GROUP, table=E2M1_TABLE)
