"""Gemma 1, 2 and 3: norms that store w - 1, a scaled embedding, a tied head. From 2 on norms also follow attention and
the MLP, and windows alternate with full attention; 3 has norms of q and k and rotary embeddings by kind.
"""

from __future__ import annotations

from typing import Any

from quire.worker.layers.linear import WeightFormat
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.rope import RopeSpec, read_ropes_by_kind
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.encoder import Encoder
from quire.worker.transformer.reader import COMMON_DEFAULTS, pattern

_ACTIVATION = "gelu_pytorch_tanh"


class Gemma(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "gemma",
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": _ACTIVATION,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    }
    facts = {"norm": "rms_offset"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["use_bidirectional_attention"] not in (None, False, "vision"):
            raise ValueError("use_bidirectional_attention is not supported: attention is causal")
        if values["hidden_act"] in (None, "gelu"):  # in the first files, which mean the approximation
            values["hidden_act"] = _ACTIVATION
        values["embed_scale"] = values["hidden_size"] ** 0.5
        values["attention_out_bias"] = values["attention_bias"]


class Gemma2(Gemma):
    config_defaults = Gemma.config_defaults | {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    facts = Gemma.facts | {"form": "sandwich"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["scale"] = values["query_pre_attn_scalar"] ** -0.5
        values["soft_cap"] = values["attn_logit_softcapping"]
        values["logit_soft_cap"] = values["final_logit_softcapping"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], values["sliding_window_pattern"])


class Gemma3(Gemma2):
    config_defaults = Gemma2.config_defaults | {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
    facts = Gemma2.facts | {"qk_norm": "head"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        embeds = values["use_bidirectional_attention"] is True  # EmbeddingGemma
        values["use_bidirectional_attention"] = None if embeds else values["use_bidirectional_attention"]
        super().complete(values, raw)
        if embeds:
            if not set(raw.get("architectures") or []) <= {"Gemma3TextModel", "Gemma3Model"}:
                raise ValueError("use_bidirectional_attention is true: the architecture must be Gemma3TextModel")
            values["mixer"] = "bidirectional"
            values["sliding_window"] = values["sliding_window"] // 2 + 1  # to each side

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return read_ropes_by_kind(values, raw, values["rope_local_base_freq"])

    @classmethod
    def context_length(cls, values: dict[str, Any], ropes: dict[str, RopeSpec]) -> int:
        return values["max_position_embeddings"]  # includes the linear scaling

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return (Encoder if spec.is_encoder else Decoder)(spec, max_model_len, weights)
