"""Nomic BERT: BERT with rotary positions and gated MLPs, named as in Nomic's own files, which transformers keeps."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.encoder import EncoderLM
from quire.worker.transformer.reader import ALIASES, COMMON_DEFAULTS

# settings of Nomic's code, and the only values that are served
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "prenorm": (False,),
    "parallel_block": (False,),
    "causal": (False,),
    "use_rms_norm": (False, None),
    "rotary_emb_fraction": (1.0, None),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "num_experts": (0, None),
}


class NomicBert(EncoderLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "nomic_bert",
        "vocab_size": 30528,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "max_trained_positions": None,
        "rms_norm_eps": 1e-12,
        "rope_theta": 1000.0,
        "type_vocab_size": 2,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
    }
    aliases = ALIASES | {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "rotary_emb_base": "rope_theta",
    }
    facts = {
        "norm": "layer_bias",
        "num_key_value_heads": None,
        "form": "sum",
        "embed_norm": True,
        "mixer": "bidirectional",
        "fused": ("qkv_proj",),
        "tie_word_embeddings": False,
    }
    renames = {
        "model.embed_tokens": "nomic_bert.embeddings.word_embeddings",
        "model.embed_types": "nomic_bert.embeddings.token_type_embeddings",
        "model.embed_norm": "nomic_bert.emb_ln",
        "model.layers": "nomic_bert.encoder.layers",
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.out_proj",
        "post_attention_layernorm": "norm1",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.up_proj": "mlp.fc11",
        "mlp.down_proj": "mlp.fc2",
        "post_feedforward_layernorm": "norm2",
        "score.dense": "nomic_bert.pooler.dense",
        "score.out_proj": "classifier",
    }
    ignored = (r"^(\w+\.)?pooler\.", r"^(cls|lm_head)\.")

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, served in _REQUIRED.items():
            if key in raw and raw[key] not in served:
                raise ValueError(f"{key} {raw[key]!r} is not supported: it must be {served[0]!r}")
        if values["mlp_fc1_bias"] != values["mlp_fc2_bias"]:
            raise ValueError("mlp_fc1_bias and mlp_fc2_bias must be equal")
        if values["hidden_act"] == "swiglu":
            values["hidden_act"] = "silu"
        values["attention_bias"] = values["attention_out_bias"] = values["qkv_proj_bias"]
        values["mlp_bias"] = values["mlp_fc1_bias"]
        values["num_token_types"] = values["type_vocab_size"]
        trained, positions = values["max_trained_positions"], values["max_position_embeddings"]
        if trained and trained < positions:  # further ones are by a scaling that depends on the length of a text
            values["max_position_embeddings"] = trained
            values["why_shorter"] = f"max_trained_positions; {positions} would need scaled rotary embeddings"
