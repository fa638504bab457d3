"""Granite 3 and 4 (dense): Llama with multipliers. Granite-SWA: also windows, sinks, and a rotary base per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class Granite(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "granite",
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        values["embed_scale"] = values["embedding_multiplier"]
        values["logit_scale"] = 1.0 / values["logits_scaling"]
        values["residual_scale"] = values["residual_multiplier"]
        values["scale"] = values["attention_multiplier"]


class GraniteDocling(Granite):
    """The language model of Granite Docling."""

    config_defaults = Granite.config_defaults | {
        "model_type": "granite_docling_text",
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    }


class GraniteSWA(Granite):
    config_defaults = Granite.config_defaults | {
        "model_type": "granite_swa",
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_rope_theta": None,
    }
    facts = {"sinks": True}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if i % 4 else FULL for i in range(values["num_hidden_layers"])]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return ropes_by_theta(values, super().ropes(values, raw)["default"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return with_theta(values, index, layer)


def ropes_by_theta(values: dict[str, Any], default: RopeSpec) -> dict[str, RopeSpec]:
    """Return the embeddings by the bases in `layer_rope_theta`; a base of 0 stands for none."""
    thetas = values["layer_rope_theta"] or [default.theta]
    return {_name(theta): replace(default, theta=float(theta)) for theta in thetas if theta} | {"default": default}


def with_theta(values: dict[str, Any], index: int, layer: LayerSpec) -> LayerSpec:
    """Return `layer` with the embedding of `ropes_by_theta` that is layer `index`'s."""
    thetas = values["layer_rope_theta"]
    return layer if thetas is None else replace(layer, rope=_name(thetas[index]) if thetas[index] else None)


def _name(theta: float) -> str:
    return f"theta {theta:g}".replace(".", "_")
