"""Muse-Glimmer: heads of q and k are normalised without weights, a gate per entry of the attended values, windows in
three of four layers, the others without rotary embedding; norms before and after attention and the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import WideRMSNorm, rms_norm
from quire.worker.models.granite import ropes_by_theta, with_theta
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.blocks import DecoderLayer, SandwichLayer
from quire.worker.transformer.calls import StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_POST_NORM_EPS = 1e-8


class MuseGlimmerLayer(SandwichLayer):
    """The norms after attention and the MLP have an epsilon of their own."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        eps = spec.raw.get("post_norm_eps", _POST_NORM_EPS)
        self.post_attention_layernorm.eps = self.post_feedforward_layernorm.eps = eps


class MuseGlimmerDecoder(Decoder):
    """A decoder that also normalises the embeddings. The last norm stores w, the others w - 1."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if self.last:
            self.norm = WideRMSNorm(spec.hidden_size, spec.norm_eps)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return MuseGlimmerLayer

    def embed(self, call: StageCall) -> torch.Tensor:
        return rms_norm(super().embed(call), None, self.spec.norm_eps)


class MuseGlimmer(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "muse_glimmer_text",
        "vocab_size": 202048,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "layer_rope_theta": None,
    }
    facts = {"form": "sandwich", "norm": "rms_offset", "qk_norm": "head_plain", "entry_gate": True}
    renames = {"self_attn.g_proj": "self_attn.gate_proj"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        values["scale"] = values["head_dim"] ** -0.5 * values["qk_scale_factor"]
        values["logit_scale"] = values["output_multiplier"]
        values["logit_soft_cap"] = values["final_logit_softcapping"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return ropes_by_theta(values, super().ropes(values, raw)["default"])

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL if _is_still(values, i) else SLIDING for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        if values["layer_rope_theta"] is None and _is_still(values, index):
            return replace(layer, rope=None)
        return with_theta(values, index, layer)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return MuseGlimmerDecoder(spec, max_model_len, weights)


def _is_still(values: dict[str, Any], index: int) -> bool:
    """Return whether layer `index` has no rotary embedding if config.json does not say so: every fourth one from the
    end.
    """
    return (values["num_hidden_layers"] - 1 - index) % 4 == 0
