"""The language models of DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR: DeepSeek V2's experts with plain attention."""

from __future__ import annotations

from typing import Any

from quire.worker.models.decoder import CausalLM
from quire.worker.models.deepseek import V2_DEFAULTS, V2Experts


class DeepseekOCR(V2Experts, CausalLM):
    config_defaults = V2_DEFAULTS | {
        "model_type": "deepseek_vl_v2",
        "vocab_size": 129280,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 896,
        "first_k_dense_replace": 1,
        "use_mla": False,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if values["use_mla"]:
            raise ValueError("use_mla true is not supported for DeepSeek-OCR")
        values["head_dim"] = None  # config.json has sizes of latent attention's heads, all 0


class UnlimitedOCR(DeepseekOCR):
    config_defaults = DeepseekOCR.config_defaults | {"model_type": "unlimited-ocr", "max_position_embeddings": 32768}
