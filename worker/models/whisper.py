"""Whisper's decoder (arXiv:2212.04356): learned positions, and attention to the encoder's output after that to tokens.

One of its layers is two here, each with a cache of its own: attention to tokens, then attention to the encoder's output
and the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.models.audio.whisper import without_key_biases
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames
from quire.worker.transformer.reader import COMMON_DEFAULTS, base_layer

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class Whisper(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "whisper",
        "vocab_size": 51865,
        "hidden_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "hidden_act": "gelu",
        "max_position_embeddings": 448,
        "max_source_positions": 1500,
        "tie_word_embeddings": True,
        "scale_embedding": False,
    }
    aliases = {
        "d_model": "hidden_size",
        "decoder_layers": "num_hidden_layers",
        "decoder_attention_heads": "num_attention_heads",
        "decoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        "max_target_positions": "max_position_embeddings",
        # these stand for other things in config.json
        "hidden_size": "",
        "num_hidden_layers": "",
        "num_attention_heads": "",
    }
    facts = {
        "norm": "layer_bias",
        "num_key_value_heads": None,
        "head_dim": None,
        "form": "optional_mlp",
        "mlp": "plain",
        "learned_positions": 0,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    }
    renames = {
        "model.embed_tokens": "model.decoder.embed_tokens",
        "model.embed_positions": "model.decoder.embed_positions",
        "model.norm": "model.decoder.layer_norm",
        "model.layers": "model.decoder.layers",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "encoder_attn.o_proj": "encoder_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "lm_head": "proj_out",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["scale_embedding"]:
            raise ValueError("scale_embedding true is not supported: it must be false")

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layer = replace(base_layer(values), rope=None)
        pair = (
            replace(layer, mlp="none"),
            replace(layer, mixer="cross", cross_length=values["max_source_positions"]),
        )
        return pair * values["num_hidden_layers"]

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        without_key_biases(self)

    def tensor_names(self, names: Collection[str]) -> TensorNames:
        found = _Names(self.renames, (*self.ignored, r"^proj_out\.") if self.spec.tie_word_embeddings else self.ignored)
        found.files = names
        return found


class _Names(TensorNames):
    """Two of our layers are one in the files."""

    def in_file(self, name: str) -> str:
        if match := _LAYER.match(name):
            layer, rest = int(match[1]), name[match.end() :]
            norm = "encoder_attn_layer_norm" if layer % 2 else "self_attn_layer_norm"
            name = f"model.layers.{layer // 2}.{re.sub('^input_layernorm', norm, rest)}"
        return super().in_file(name)
