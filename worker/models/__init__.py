"""The models we have, by the architecture that config.json names. Imported only when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.worker.models.decoder import CausalLM
    from quire.worker.models.hf_config import ModelSpec

MODELS = {
    "LlamaForCausalLM": "quire.worker.models.llama:Llama",
    "MistralForCausalLM": "quire.worker.models.mistral:Mistral",
    "Qwen2ForCausalLM": "quire.worker.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "quire.worker.models.qwen3:Qwen3",
}


def model_class(architecture: str) -> type[CausalLM]:
    """Raises ValueError listing the architectures we have."""
    if architecture not in MODELS:
        raise ValueError(f"architecture not supported: {architecture}. Supported: {', '.join(MODELS)}")
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)


def build_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None, quantization: str | None = None) -> CausalLM:
    """The model with uninitialised weights of `dtype` on `device`, this rank's share of it (`quire.worker.parallel`).

    `max_model_len` bounds the positions that rotary tables are made for; by default it is the spec's. With `quantization` (`layers/quant.py`) the weights are
    quantized when they have been loaded. Raises ValueError for an unknown architecture and for sizes that the ranks do not divide.
    """
    import torch

    cls = model_class(spec.architecture)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(spec, max_model_len or spec.max_model_len).eval()
    finally:
        torch.set_default_dtype(default)
    if quantization:
        from quire.worker.layers.quantization.int_at_load import quantize_at_load

        quantize_at_load(model, quantization)
    return model
