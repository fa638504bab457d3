"""GLM-4: half of a head is rotated, in interleaved pairs. GLM-4-0414 also has norms after attention and the MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.worker.models.qwen_vl import AxialRope
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Glm(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "glm",
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    facts: ClassVar[dict[str, Any]] = {
        "fused": ("gate_up_proj",),
        "rope_interleaved": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    }


class Glm4(Glm):
    config_defaults = Glm.config_defaults | {"model_type": "glm4"}
    facts = Glm.facts | {"form": "sandwich"}
    renames = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }


class Glm4v(AxialRope, Glm4):
    """The language model of GLM-4.1V and 4.6V: rotary embeddings have three axes."""

    default_section, interleaved_axes = (8, 12, 12), False
    config_defaults = Glm4.config_defaults | {
        "model_type": "glm4v_text",
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    }


class GlmOcr(Glm4v):
    """The language model of GLM-OCR."""

    config_defaults = Glm4v.config_defaults | {
        "model_type": "glm_ocr_text",
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    facts = Glm4v.facts | {"attention_bias": False}
