"""gpt-oss (https://arxiv.org/abs/2508.10925): windows in every other layer, attention sinks, biases everywhere, and
experts with a clamped activation.
"""

from __future__ import annotations

from typing import Any

from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

# of a config.json without any
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        }
    )
    facts = {"sinks": True, "mlp_bias": True}
    renames = {"mlp.gate": "mlp.router"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if values[key] != only:
                raise ValueError(f"{key} {values[key]!r} is not supported, only {only}")
        values["attention_out_bias"] = values["attention_bias"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters")
        return super().ropes(values, raw if given else raw | {"rope_scaling": _ROPE})

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if (i + 1) % 2 else FULL for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(
            routing(values, scores="logits", weights="softmax", bias=True),
            values["intermediate_size"],
            activation="clamped_silu",
            bias=True,
            transposed=True,
            interleaved=True,
        )
