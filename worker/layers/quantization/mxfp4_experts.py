"""Experts in MXFP4, as gpt-oss stores them: all experts of a layer in one tensor of blocks and one of exponents.

Twice a 4-bit float (e2m1) is an integer up to 12 in size, so the weights become 8-bit integers in groups of 32 without
loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.layers.linear import Linear, LinearMethod, empty_parameter
from quire.worker.layers.quantization.int_groups import Groups, give_groups
from quire.worker.layers.quantization.packing import e2m1_doubled, e8m0, nibbles

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
                f"experts in MXFP4 with {layer.in_features} inputs per rank, which {GROUP} does not divide"
            )
        layer.blocks = empty_parameter(layer.out_features, groups, GROUP // 2, parts=[], dtype=torch.uint8)
        layer.exponents = empty_parameter(layer.out_features, groups, parts=[], dtype=torch.uint8)
        layer.dtype = torch.get_default_dtype()

    def num_bytes(self, layer: Linear) -> int:
        weights = layer.out_features * layer.in_features
        return weights + weights // 16 + (0 if layer.bias is None else layer.bias.nbytes)

    def finalize(self, layer: Linear) -> None:
        values, scales = e2m1_doubled(nibbles(layer.blocks.data)).flatten(-2), e8m0(layer.exponents.data) / 2
        layer.blocks = layer.exponents = None
        give_groups(layer, Groups(values, scales, None, 8, GROUP), layer.dtype)
