"""Checkpoints of the bitsandbytes package, as transformers saves them, load as the weights that the package computes.

The package is large and optional: `pip install bitsandbytes` runs these tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.worker.layers.linear import Linear
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.worker import quantized_checkpoints as make
from tests.worker.layers.test_stored_weights import SIZES, load, weight_of

functional = pytest.importorskip("bitsandbytes.functional", reason="the bitsandbytes package is not installed")


def four_bits(kind: str, nested: bool) -> make.Store:
    def store(name: str, weight: torch.Tensor) -> tuple[make.Stored, torch.Tensor]:
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        tensors = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        return tensors | {"weight": codes}, functional.dequantize_4bit(codes, state)

    return store


def eight_bits(name: str, weight: torch.Tensor) -> tuple[make.Stored, torch.Tensor]:
    values, scales, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": values, "SCB": scales, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, functional.int8_vectorwise_dequant(values, scales)


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "fp4", "fp4 nested", "int8"])
def test_weights_are_those_of_the_package(tmp_path, name):
    source = build_checkpoint("qwen3", tmp_path / "source", **SIZES)
    kind, _, nested = name.partition(" ")
    config, _ = make.bitsandbytes(8 if kind == "int8" else 4, bool(nested), kind)
    folder = Path(make.write(source, tmp_path, config, eight_bits if kind == "int8" else four_bits(kind, bool(nested))))
    model, plain = load(folder / "quantized"), load(folder / "plain")
    count = 0
    for (path, layer), expected in zip(model.named_modules(), plain.modules(), strict=True):
        if isinstance(layer, Linear):
            assert torch.allclose(weight_of(layer), expected.weight, rtol=1e-6, atol=1e-7), path
            count += ".layers." in path
    assert count == 8  # four fused projections in each of two layers
