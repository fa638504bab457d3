"""GLM-5-next (GLM-5.3): Kimi Delta Attention with a bounded decay, latent attention without rotary embedding in some
layers, hyper-connections, DeepSeek V3's experts with bounded inputs of the activation.

An index chooses `index_topk` tokens in groups of `index_kpool` (`mixers/key_index.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.layers.linear import WeightFormat
from quire.worker.models.deepseek import GlmMoeDsa
from quire.worker.models.kimi_linear import kimi_delta
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.hyper_connections import HyperDecoder
from quire.worker.transformer.reader import FULL, STATE

# keys of linear_attn_config, and the names of transformers
_NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


class Glm5Next(GlmMoeDsa):
    config_defaults = GlmMoeDsa.config_defaults | {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "max_position_embeddings": 1048576,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "num_experts": 288,
        "swiglu_limit": 10.0,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "linear_attn_config": None,
        "index_kpool": 16,
        "index_kpool_always_select_tail": True,
    }
    state_kinds = {STATE: STATE, "indexed_attention": FULL}
    renames = GlmMoeDsa.renames | {"index_kpool_compress_gate.weight": "index_kpool_compress_gate"}
    ignored = (*GlmMoeDsa.ignored, r"\.shared_head\.")

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        spec = super().read_config(architecture, raw)
        limit = spec.raw.get("swiglu_limit", cls.config_defaults["swiglu_limit"])
        return replace(spec, hidden_act=_bounded(limit))  # a prediction head is a plain layer, without streams

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        kinds, nested = values["layer_types"], values["linear_attn_config"] or {}
        super().complete(values, raw)
        if values["qk_rope_head_dim"]:
            raise ValueError("qk_rope_head_dim must be 0 for GLM-5-next")
        if not values["index_kpool_always_select_tail"]:
            raise ValueError("index_kpool_always_select_tail false is not supported for GLM-5-next")
        for key, name in _NESTED.items():
            values[name] = nested.get(key, values[name])
        values.update(layer_types=kinds, latent_eps=values["rms_norm_eps"], head_dim=values["qk_nope_head_dim"])

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL if i % 4 == 3 else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return replace(super().moe(values), activation=_bounded(values["swiglu_limit"]))

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return layer
        state = kimi_delta(values, lower_bound=values["linear_lower_bound"])
        return replace(layer, mixer="kimi_delta", state=state)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return HyperDecoder(spec, max_model_len, weights)


def _bounded(limit: float | None) -> str:
    return f"silu_of_bounded:{float(limit):g}" if limit else "silu"
