"""Pack weights in the blocks of GGUF files for the native products."""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise

from quire.worker.cpu.native_linear import MixedLinear, QuantizedLinear
from quire.worker.layers.linear import Linear
from quire.worker.layers.quantization.blocks import Rows


def packed_blocks(layer: Linear, parts: list[Rows], narrow: bool = False) -> QuantizedLinear | MixedLinear:
    """Return the layer's weight, packed in the same number of bits. `narrow` is that of `QuantizedLinear`."""
    runs = [(kind, [part.blocks for part in same]) for kind, same in groupby(parts, lambda part: part.type)]
    if len(runs) == 1:
        shape = layer.out_features, layer.in_features
        return QuantizedLinear.from_blocks(runs[0][1], runs[0][0], shape, layer.bias, layer.gated, narrow)
    counts = [sum(len(blocks) for blocks in run) for _, run in runs]
    spans = [*pairwise([0, *accumulate(counts[:-1]), layer.out_features])]
    biases = [None if layer.bias is None else layer.bias[a:b] for a, b in spans]
    return MixedLinear([
        QuantizedLinear.from_blocks(run, kind, (b - a, layer.in_features), bias, narrow=narrow)
        for (kind, run), (a, b), bias in zip(runs, spans, biases)
    ])  # fmt: skip
