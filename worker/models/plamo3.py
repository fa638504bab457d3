"""PLaMo 3: windows in most layers, with a rotary base of their own; heads of q and k are normalised; norms before and
after the mixer and the MLP, which store w minus a constant of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.rope import RopeSpec, read_ropes_by_kind
from quire.worker.transformer.blocks import DecoderLayer, SandwichLayer
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.reader import COMMON_DEFAULTS, pattern

# of the norms after the mixer and after the MLP; of the others it is 1
AFTER = 1 / 5, 1 / 5**1.5


class PlamoLayer(SandwichLayer):
    """The norms after the mixer and the MLP store w minus a constant."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        for norm, offset in zip((self.post_attention_layernorm, self.post_feedforward_layernorm), AFTER):
            norm.weight.view_of_tensor = partial(_plus, offset)
            norm.weight.dummy_mean = 1 - offset


def _plus(offset: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() + offset


class PlamoDecoder(Decoder):
    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return PlamoLayer


class Plamo3(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "plamo3",
        "vocab_size": 32000,
        "intermediate_size": 13312,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "sliding_window": 128,
        "sliding_window_pattern": 8,
        "rope_theta": 150000.0,
        "rope_local_theta": 10000.0,
        "rope_scaling_factor": 1,
        "initial_context_length": None,
        "tie_word_embeddings": True,
    }
    aliases = CausalLM.aliases | {"window_size": "sliding_window"}
    facts = {"form": "sandwich", "norm": "rms_offset", "qk_norm": "head", "fused": ("qkv_proj", "gate_up_proj")}
    renames = {
        "model.layers": "model.layers.layers",
        "self_attn": "mixer",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        if values["hidden_act"] == "swiglu":
            values["hidden_act"] = "silu"

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], values["sliding_window_pattern"])

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        if values["rope_scaling_factor"] != 1 and not raw.get("rope_parameters"):
            factor, length = values["rope_scaling_factor"], values["initial_context_length"]
            yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
            raw = raw | {"rope_parameters": yarn | {"truncate": False}}
        return read_ropes_by_kind(values, raw, values["rope_local_theta"])

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return PlamoDecoder(spec, max_model_len, weights)
