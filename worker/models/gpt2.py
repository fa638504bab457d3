"""GPT-2: learned positions, layer norms, biases everywhere, matrices stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import ALIASES, COMMON_DEFAULTS


class GPT2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": None,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    aliases = ALIASES | {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    }
    facts = {
        "norm": "layer_bias",
        "num_key_value_heads": None,
        "mlp": "plain",
        "fused": ("qkv_proj",),
        "learned_positions": 0,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    }
    renames = {
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    transposed = (r"_proj\.weight$",)
    ignored = (r"\.attn\.(bias|masked_bias)$",)  # old checkpoints contain the causal mask

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["add_cross_attention"]:
            raise ValueError("add_cross_attention is not supported: it needs an encoder")
        values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        scale = layer.head_dim**-0.5 if values["scale_attn_weights"] else 1.0
        return replace(layer, scale=scale / (index + 1) if values["scale_attn_by_inverse_layer_idx"] else scale)
