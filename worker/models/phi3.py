"""Phi-3, 3.5 and 4: fused projections and long contexts by a factor per frequency."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class Phi3(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    facts = {
        "fused": ("qkv_proj", "gate_up_proj"),
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
    }

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if values["sliding_window"] else FULL] * values["num_hidden_layers"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        if "yarn" in (rope.get("type"), rope.get("rope_type")):  # the first files' name of longrope
            rope |= {"type": "longrope", "rope_type": "longrope"}
        return {"default": read_rope(rope, values, {"original_max_position_embeddings": 4096} | raw)}
