"""Checkpoints of AMD's Quark (`quant_method` quark): FP8 and int8 with a scale per tensor or output, FP8 in blocks,
MXFP4, and 4-bit integers in groups.

`layer_quant_config` gives layers that its patterns match another scheme than `global_quant_config`; `exclude` leaves
them plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch

from quire.worker.layers.quantization.awq import Awq
from quire.worker.layers.quantization.compressed_tensors import Integers
from quire.worker.layers.quantization.fp4 import Mxfp4
from quire.worker.layers.quantization.fp8 import ACTIVATION_SCALES, Fp8
from quire.worker.layers.quantization.stored import CheckpointFormat, Scheme, unsupported

_SUPPORTED = (
    "fp8_e4m3 and int8 per_tensor or per_channel, fp8_e4m3 per_block, fp4 per_group of 32 with scale_format e8m0, "
    "int4 and uint4 per_group"
)


class QuarkFormat(CheckpointFormat):
    """The formats of Quark. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        export = config.get("export") or {}
        if (form := export.get("weight_format", "real_quantized")) != "real_quantized":
            unsupported("export.weight_format", form, "real_quantized")
        if config.get("layer_type_quant_config"):
            unsupported("layer_type_quant_config", config["layer_type_quant_config"], "none")
        self.reorder = (export.get("pack_method") or "reorder") == "reorder"
        self.weights = self._scheme(config.get("global_quant_config"))
        layers = config.get("layer_quant_config") or {}
        self.layers = {pattern: self._scheme(values) for pattern, values in layers.items()}
        self.excluded = config.get("exclude") or []

    def _scheme(self, values: dict[str, Any] | None) -> Scheme | None:
        weight = (values or {}).get("weight")
        if isinstance(weight, list) and len(weight) == 1:
            weight = weight[0]
        if weight is None:
            return None
        if isinstance(weight, dict) and not weight.get("is_dynamic") and (scheme := self._weight_scheme(weight)):
            return scheme
        unsupported("weight", weight, _SUPPORTED)

    def _weight_scheme(self, weight: dict[str, Any]) -> Scheme | None:
        group, symmetric = weight.get("group_size"), weight.get("symmetric") is not False
        match weight.get("dtype"), weight.get("qscheme"):
            case "fp8_e4m3", "per_tensor":
                return Fp8(None, None)
            case "fp8_e4m3", "per_channel" if weight.get("ch_axis") == 0:
                return Fp8(1, None)
            case "fp8_e4m3", "per_block" if len(block := weight.get("block_size") or ()) == 2:
                return Fp8(*block)
            case "int8", "per_tensor" | "per_channel" as which if symmetric:
                return Integers(8, None, packed=False, per_tensor=which == "per_tensor")
            case "fp4", "per_group" if (group, weight.get("scale_format")) == (32, "e8m0"):
                return Mxfp4("weight")
            case "int4" | "uint4", "per_group" if isinstance(group, int) and group > 0:
                names = "weight", "weight_scale", "weight_zero_point"
                return Awq(group, zeros=not symmetric, names=names, in_order=not self.reorder, signed=symmetric)
        return None

    def scheme(self, name: str) -> Scheme | None:
        if name.endswith("embed_tokens") or any(_matches(name, pattern) for pattern in self.excluded):
            return None
        return next((scheme for pattern, scheme in self.layers.items() if _matches(name, pattern)), self.weights)

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return bool(ACTIVATION_SCALES.search(name)) or (name.endswith(".weight_zero_point") and not read().any())


def _matches(name: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else fnmatchcase(name, pattern)
