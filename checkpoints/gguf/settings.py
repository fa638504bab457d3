"""Settings of config.json from the metadata of GGUF files: decoders without experts. Torch-free."""

from __future__ import annotations

from statistics import NormalDist

from quire.checkpoints.gguf.metadata import Metadata, Settings


def logit_bound(m: Metadata) -> float | None:
    """Return the bound of the logits, or None if there is none."""
    return m.get("final_logit_softcapping") or None


def attention_bias(m: Metadata) -> Settings:
    return {"attention_bias": m.has_bias()}


def original_length(m: Metadata) -> Settings:
    return {"original_max_position_embeddings": m.get("rope.scaling.original_context_length")}


def mistral(m: Metadata) -> Settings:
    if m.get("attention.temperature_scale"):
        return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return {"sliding_window": None}


def gemma2(m: Metadata) -> Settings:
    heads, hidden, dim = m.one("attention.head_count"), m.get("embedding_length"), m.get("attention.key_length")
    wide = m.get("block_count") == 46  # 27B, whose scale llama.cpp knows by its number of layers
    return m.listed_windows() | {
        "query_pre_attn_scalar": m.query_scalar(hidden // heads if wide else dim),
        "attn_logit_softcapping": m.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": logit_bound(m),
    }


def gemma3(m: Metadata) -> Settings:
    heads, hidden, dim = m.one("attention.head_count"), m.get("embedding_length"), m.get("attention.key_length")
    wide = m.get("block_count") == 62
    return m.listed_windows() | {
        "query_pre_attn_scalar": m.query_scalar(hidden // heads if wide else dim),
        "rope_local_base_freq": m.get("rope.freq_base_swa"),
        "final_logit_softcapping": logit_bound(m),
    }


def cohere(m: Metadata) -> Settings:
    return {"logit_scale": m.get("logit_scale") or 1.0, "use_qk_norm": m.has("attn_q_norm.weight")}


def granite(m: Metadata) -> Settings:
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    embedding, residual, attention, logits = (m.get(key) for key in keys)
    return {
        "attention_bias": m.has_bias(),
        "embedding_multiplier": embedding or 1.0,
        "residual_multiplier": residual or 1.0,
        "attention_multiplier": attention or m.get("attention.key_length") ** -0.5,
        "logits_scaling": logits or 1.0,
    }


def olmo2(m: Metadata) -> Settings:
    if m.window() is None:
        return {}
    return m.listed_windows() | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}


def phi3(m: Metadata) -> Settings:
    return {"sliding_window": m.window()} | original_length(m)


def starcoder2(m: Metadata) -> Settings:
    return {"use_bias": m.has_bias(), "sliding_window": m.window()}


def nemotron(m: Metadata) -> Settings:
    return attention_bias(m) | {"mlp_bias": m.has("ffn_up.bias")}


def gemma3n(m: Metadata) -> Settings:
    sizes = m.get("feed_forward_length")
    return m.listed_windows() | {
        "intermediate_size": sizes,
        "rope_local_base_freq": m.get("rope.freq_base_swa"),
        "final_logit_softcapping": logit_bound(m),
        "num_kv_shared_layers": m.get("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight"),
        "altup_num_inputs": m.get("altup.num_inputs"),
        "altup_active_idx": m.get("altup.active_idx"),
        "laurel_rank": m.rows("blk.0.laurel_l.weight"),
        # stored are quantiles of the normal distribution in float32
        "activation_sparsity_pattern": [round(NormalDist().cdf(x), 6) for x in m.get("activation_sparsity_scale")],
    }


def exaone4(m: Metadata) -> Settings:
    """Return the settings. Windows count if the file lists their layers, and in the 32B."""
    windows = m.listed_windows()
    return windows if "sliding_attention" in windows["layer_types"] else {"sliding_window": None}


def granite_swa(m: Metadata) -> Settings:
    rotates, theta = m.get("attention.rope_pattern"), m.get("rope.freq_base")
    return granite(m) | m.listed_windows() | {"layer_rope_theta": [theta if has else 0 for has in rotates]}


def latent(m: Metadata) -> Settings:
    rope, heads = m.get("rope.dimension_count"), m.one("attention.head_count")
    key = m.get("attention.key_length_mla")
    return {
        "q_lora_rank": m.get("attention.q_lora_rank") or None,
        "kv_lora_rank": m.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": m.get("attention.value_length_mla"),
        "head_dim": None,
        "num_key_value_heads": heads,
    }
