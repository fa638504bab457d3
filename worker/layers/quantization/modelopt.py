"""Checkpoints of NVIDIA's modelopt: `quant_algo` FP8 (per tensor, or per output), FP8_PB_WO (blocks of
128 x 128), MXFP8 and NVFP4.

The settings are in config.json or, in older exports, in hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch

from quire.worker.layers.quantization.fp4 import Nvfp4
from quire.worker.layers.quantization.fp8 import ACTIVATION_SCALES, Fp8
from quire.worker.layers.quantization.stored import CheckpointFormat, Scheme, named_by, unsupported

_SCHEMES: dict[str, Scheme] = {
    "FP8": Fp8(None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(1, None),
    "FP8_PB_WO": Fp8(128, 128),
    "MXFP8": Fp8(1, 32, exponents=True),
    "NVFP4": Nvfp4("weight", "weight_scale", "weight_scale_2", divide=False),
}


class ModelOptFormat(CheckpointFormat):
    """The formats of modelopt. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        config = config.get("quantization") or config
        algorithm = config.get("quant_algo")
        if algorithm not in _SCHEMES:
            unsupported("quant_algo", algorithm, ", ".join(_SCHEMES))
        self.weights = _SCHEMES[algorithm]
        self.skipped = config.get("exclude_modules") or config.get("ignore") or []

    def scheme(self, name: str) -> Scheme | None:
        if name.endswith("embed_tokens"):
            return None
        skipped = any(fnmatchcase(name, pattern) or named_by(name, pattern.rstrip("*.")) for pattern in self.skipped)
        return None if skipped else self.weights

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return bool(ACTIVATION_SCALES.search(name))
