"""Weight-only quantization at load: the weights of linear layers become 8-bit or 4-bit integers with a bfloat16 scale
per row and group of columns.

weight[row, column] = scale[row, column // group] * value[row, column], as llama.cpp's Q8_0 and Q4_0 do in groups of 32.
Layers are built and loaded in bfloat16 and quantize their weights one by one in `finalize`. A tensor-parallel rank
quantizes the slice that it holds, so groups never straddle ranks. The output head has 8 bits in either mode: it affects
quality most and, if tied, is the embedding, whose rows are read from it. A separate embedding stays bfloat16.

Without native kernels, and until these are compiled, `int_groups.PlainGroups` multiplies. Activations are bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import Linear, LinearMethod, PlainLinear, WeightFormat
from quire.worker.layers.quantization.int_groups import Groups, PlainGroups

BITS = {"int8": 8, "int4": 4}
HEAD_BITS = 8
# bits -> columns that share a scale: groups of 32 cost a quarter of a bit more per weight; groups of 128 lose more
# quality at 4 bits and almost none at 8
GROUPS = {8: 128, 4: 64}
_PIECE = 1 << 22  # weights processed at once


class QuantizeAtLoad(PlainLinear):
    """Loads bfloat16 weights like any layer, then quantizes them and replaces the layer's method."""

    def __init__(self, bits: int):
        self.bits = bits

    def num_bytes(self, layer: Linear) -> int:
        bias = 0 if layer.bias is None else layer.bias.nbytes
        return int(layer.out_features * layer.in_features * quantized_bytes(self.bits)) + bias

    def finalize(self, layer: Linear) -> None:
        native = layer.ops and layer.ops.quantize_weight(layer, self.bits, GROUPS[self.bits])
        layer.method = native or self._plain(layer)
        layer.weight = None

    def _plain(self, layer: Linear) -> PlainGroups:
        values, scales = quantize(layer.weight, self.bits)
        groups = Groups(values[:, : layer.in_features], scales, None, self.bits, GROUPS[self.bits])
        return PlainGroups(layer, groups, torch.bfloat16)


def quantized_bytes(bits: int) -> float:
    """Return bytes per weight, including its share of a scale."""
    return bits / 8 + 2 / GROUPS[bits]


class IntAtLoad(WeightFormat):
    """`--quantization`: quantizes the layers of a floating-point checkpoint after they are loaded.

    `quantization` is a key of BITS.
    """

    def __init__(self, quantization: str):
        self.layers, self.output_head = QuantizeAtLoad(BITS[quantization]), QuantizeAtLoad(HEAD_BITS)

    def linear(self, prefix: str) -> LinearMethod:
        return self.layers

    def head(self, prefix: str) -> LinearMethod:
        return self.output_head


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert weight `[n, k]` bfloat16 to (values int8 `[n, K]`, scales bfloat16 `[n, K / group]`), where K is k padded
    with zeros to a multiple of the group size.

    Symmetric. With 8 bits a group's largest entry becomes +-127. With 4 bits the scale is the one with the least
    squared error among 15 candidates around the scale that maps the largest entry to -8. The native `quantize` gives
    the same result.
    """
    step, group = max(1, _PIECE // weight.shape[1]), GROUPS[bits]
    parts = [
        _quantize(F.pad(part.float(), (0, -part.shape[1] % group)).view(len(part), -1, group), bits)
        for part in weight.split(step)
    ]
    values, scales = zip(*parts)
    return torch.cat(values).flatten(1), torch.cat(scales)


def _quantize(w: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = w.gather(-1, w.abs().argmax(-1, keepdim=True))
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    best = (top.abs() / 127 if bits == 8 else top / -8).to(torch.bfloat16).float()
    if bits == 4:
        least = _squared_error(w, best, low, high)
        for divisor in torch.arange(6.5, 9.76, 0.25).tolist():
            scale = (-top / divisor).to(torch.bfloat16).float()
            error = _squared_error(w, scale, low, high)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, scale, best)
    best = torch.where(top.abs() < 1e-30, 0, best)
    return _rounded(w, best, low, high).to(torch.int8), best.squeeze(-1).to(torch.bfloat16)


def _rounded(w: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (w / scale.where(scale != 0, 1)).round_().clamp_(low, high)


def _squared_error(w: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (w - _rounded(w, scale, low, high) * scale).square_().sum(-1, keepdim=True)
