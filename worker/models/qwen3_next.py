"""Qwen3-Next and Qwen3.5: three layers with a gated delta rule for each layer with attention, whose output is gated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.state import DeltaSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, softmax_routing
from quire.worker.transformer.mtp_spec import WithMTP
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE

_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


class Qwen35(WithMTP, CausalLM):
    mtp_names: ClassVar[dict[str, str]] = {"layer": "mtp.layers.{i}"} | {
        part: f"mtp.{part}" for part in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    mtp_key = "mtp_num_hidden_layers"
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        # of GGUF files
        "linear_tiled_heads": False,
        "linear_grouped": True,
    }
    facts = {"norm": "rms_offset", "qk_norm": "gated_head"}
    state_kinds = {STATE: STATE}
    grouped = False  # whether the projections of each key head are together

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        interval = values["full_attention_interval"]
        return [FULL if (i + 1) % interval == 0 else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return layer
        sizes = [values[f"linear_{name}"] for name in _SIZES]
        tiled, grouped = values["linear_tiled_heads"], cls.grouped and values["linear_grouped"]
        state = DeltaSpec(*sizes, grouped=grouped, grouped_gates=cls.grouped, tiled=tiled)
        return replace(layer, mixer="delta", state=state)


class Qwen35Moe(MoEFamily, Qwen35):
    config_defaults = (
        Qwen35.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
    )
    facts = Qwen35.facts | {"norm_topk_prob": True}

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(
            softmax_routing(values),
            values["moe_intermediate_size"],
            shared_size=values["shared_expert_intermediate_size"],
            shared_gate=True,
        )


class Qwen3Next(Qwen35Moe):
    config_defaults = Qwen35Moe.config_defaults | {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    }
    facts = Qwen35.facts
    grouped = True
