"""OPT: learned positions from row 2 on, layer norms, biases everywhere."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import ALIASES, COMMON_DEFAULTS


class OPT(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "relu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": None,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    }
    aliases = ALIASES | {"ffn_dim": "intermediate_size"}
    facts = {
        "norm": "layer_bias",
        "num_key_value_heads": None,
        "mlp": "plain",
        "learned_positions": 2,
        "rms_norm_eps": 1e-5,
    }
    renames = {
        "model.embed_tokens": "model.decoder.embed_tokens",
        "model.embed_positions": "model.decoder.embed_positions",
        "model.norm": "model.decoder.final_layer_norm",
        "model.layers": "model.decoder.layers",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, needed in (
            ("do_layer_norm_before", True),
            ("layer_norm_elementwise_affine", True),
            ("_remove_final_layer_norm", False),
            ("word_embed_proj_dim", values["hidden_size"]),
        ):
            if values[key] not in (needed, None):
                raise ValueError(f"{key} {values[key]!r} is not supported: it must be {needed!r}")
        values["attention_bias"] = values["attention_out_bias"] = values["mlp_bias"] = values["enable_bias"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}
