"""Weight-only quantization at load: the matrices of the layers become integers of 8 or 4 bits with a bfloat16 scale per
row and group of columns.

weight[row, column] = scale[row, column // group] * value[row, column], as llama.cpp's Q8_0 and Q4_0 do in groups of 32.
Layers are built and loaded in bfloat16 and turn their weights into integers one by one when they are finalized: a
tensor-parallel rank quantizes the slice that it holds, so groups never straddle ranks. The output head is 8 bits in
either mode (it costs most quality and, tied, is the embedding, whose rows are read from it); an embedding of its own
stays bfloat16.

`PlainQuantMethod` is plain torch for machines without the native kernels, and until they are compiled: it widens the
weights for every product, which is correct and slow. A platform's native method takes over from it
(`Ops.quantized_method`), values and scales unchanged. Activations are bfloat16 in both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import Linear, LinearMethod, PlainLinear, WeightFormat, product

BITS = {"int8": 8, "int4": 4}
HEAD_BITS = 8
# bits -> columns that share a scale: 32 cost a quarter of a bit more per weight, 128 lose more at 4 bits and next to
# nothing at 8
GROUPS = {8: 128, 4: 64}
_PIECE = 1 << 22  # weights to work on at once


class QuantizeAtLoad(PlainLinear):
    """Takes bfloat16 weights like any layer, and hands the layer over once they are there."""

    def __init__(self, bits: int):
        self.bits = bits

    def num_bytes(self, layer: Linear) -> int:
        bias = 0 if layer.bias is None else layer.bias.nbytes
        return int(layer.out_features * layer.in_features * quantized_bytes(self.bits)) + bias

    def finalize(self, layer: Linear) -> None:
        native = layer.ops and layer.ops.quantize_weight(layer, self.bits, GROUPS[self.bits])
        layer.method = native or PlainQuantMethod(layer, layer.weight, self.bits)
        layer.weight = None


class PlainQuantMethod(PlainLinear):
    """Keeps int8 values, or pairs of 4-bit values in a byte (low half first), as buffers of the layer: `quantized` and
    `scales`.
    """

    def __init__(self, layer: Linear, weight: torch.Tensor, bits: int):
        self.layer, self.bits = layer, bits
        values, scales = quantize(weight, bits)
        layer.register_buffer("quantized", values if bits == 8 else pack_int4(values), persistent=False)
        layer.register_buffer("scales", scales, persistent=False)

    def finalize(self, layer: Linear) -> None:
        if layer.ops is None:
            return
        values = self._values(layer.quantized)[:, : layer.in_features]
        if native := layer.ops.quantized_method(layer, values, layer.scales, self.bits, GROUPS[self.bits]):
            layer.method = native

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        step = max(1, _PIECE // layer.in_features)
        pieces = [
            product(x, self._widen(layer.quantized[i : i + step], layer.scales[i : i + step]))
            for i in range(0, layer.out_features, step)
        ]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        return whole if layer.bias is None else whole + layer.bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the weight, for an embedding tied to it."""
        return self._widen(self.layer.quantized[ids], self.layer.scales[ids])

    def _values(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.bits == 8 else unpack_int4(stored)

    def _widen(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        values = self._values(stored)
        return (
            (values.view(*scales.shape, GROUPS[self.bits]).float() * scales.float().unsqueeze(-1))
            .to(torch.bfloat16)
            .view(len(values), -1)[:, : self.layer.in_features]
        )


def quantized_bytes(bits: int) -> float:
    """Bytes that a weight takes with its share of a scale."""
    return bits / 8 + 2 / GROUPS[bits]


class IntAtLoad(WeightFormat):
    """`--quantization`: floating-point checkpoints whose layers are rounded when they have been loaded.

    `quantization` is a key of BITS.
    """

    def __init__(self, quantization: str):
        self.layers, self.output_head = QuantizeAtLoad(BITS[quantization]), QuantizeAtLoad(HEAD_BITS)

    def linear(self, prefix: str) -> LinearMethod:
        return self.layers

    def head(self, prefix: str) -> LinearMethod:
        return self.output_head


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight `[n, k]` bfloat16 -> (values int8 `[n, K]`, scales bfloat16 `[n, K / group]`), K being k rounded up to
    whole groups with zeros.

    Symmetric. With 8 bits a group's largest entry becomes +-127; with 4 the scale is the one of 15 candidates around
    "the largest entry becomes -8" that has the least squared error. The native `quantize` does the same.
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


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int8 `[n, K]` of -8 .. 7, K even -> uint8 `[n, K / 2]`."""
    unsigned = (values + 8).to(torch.uint8)
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_int4`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8) - 8
