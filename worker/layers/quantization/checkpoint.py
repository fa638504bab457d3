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
    "mxfp4": "fp4:Mxfp4Format",
    "gguf": "gguf:GgufFormat",
}


def checkpoint_format(raw: dict[str, Any]) -> CheckpointFormat | None:
    """The format that a parsed config.json declares, or None if the weights are not quantized.

    Raises:
        ValueError: the format, or one of its settings, is not supported.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    method = config.get("quant_method", "unknown")
    if method not in FORMATS:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not supported; supported: {', '.join(FORMATS)}"
        )
    module, name = FORMATS[method].split(":")
    return getattr(importlib.import_module(f"quire.worker.layers.quantization.{module}"), name)(config)
