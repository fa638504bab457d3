"""The formats of quantized checkpoints, by `quant_method`. Their modules are imported on demand."""

from __future__ import annotations

import importlib
from typing import Any

from quire.worker.layers.quantization.stored import CheckpointFormat

FORMATS = {
    "fp8": "fp8:Fp8Format",
    "fbgemm_fp8": "fp8:Fp8Format",
    "compressed-tensors": "compressed_tensors:CompressedTensorsFormat",
    "awq": "awq:AwqFormat",
    "gptq": "gptq:GptqFormat",
    "bitsandbytes": "bitsandbytes:BitsAndBytesFormat",
    "modelopt": "modelopt:ModelOptFormat",
    "modelopt_fp4": "modelopt:ModelOptFormat",
    "auto-round": "auto_round:AutoRoundFormat",
    "intel/auto-round": "auto_round:AutoRoundFormat",
    "quark": "quark:QuarkFormat",
    "mxfp8": "fp8:Fp8Format",
    "mxfp4": "fp4:Mxfp4Format",
    "gguf": "gguf:GgufFormat",
}


def checkpoint_format(raw: dict[str, Any]) -> CheckpointFormat | None:
    """Return the format that a parsed config.json declares, or None if the weights are not quantized.

    Raises:
        ValueError: the format, or one of its settings, is not supported.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ValueError(f"quantization_config must be an object, is {config!r}")
    method = config.get("quant_method") or _undeclared(config)
    if method not in FORMATS:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not supported; supported: {', '.join(FORMATS)}. Serve "
            "the model's original weights instead (--quantization int4 or int8 rounds them at load), or a copy in one "
            "of these formats"
        )
    module, name = FORMATS[method].split(":")
    return getattr(importlib.import_module(f"quire.worker.layers.quantization.{module}"), name)(config)


def _undeclared(config: dict[str, Any]) -> str:
    """Return the method of older settings, which lack `quant_method`."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in config else "unknown"
