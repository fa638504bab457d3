"""Settings of config.json from the metadata of GGUF files: experts. Torch-free."""

from __future__ import annotations

from typing import Any

from quire.checkpoints.gguf.metadata import FULL, SLIDING, Metadata, Settings
from quire.checkpoints.gguf.names import PRE
from quire.checkpoints.gguf.ropes import named_scaling
from quire.checkpoints.gguf.settings import granite, latent, logit_bound

_SIGMOID = 2  # expert_gating_func
GATED = PRE | {"attn_gate": "self_attn.g_proj"}
DOTS3 = GATED | {"attn_k_norm": "self_attn.k_rope_only_layernorm"}
_STREAMS = {"attn": "hc_attn_layer", "ffn": "hc_mlp_layer"}
HY_V4 = GATED | {
    f"{place}_{name}.weight": f"{module}_{name}"
    for name in ("fn", "base", "scale")
    for place, module in (
        *((f"hc_{half}", f"{layer}.hc_pre.hc") for half, layer in _STREAMS.items()),
        ("output_hc", "model.hc_head.hc_head"),
    )
}


def experts(m: Metadata, size_key: str = "moe_intermediate_size", **more: Any) -> Settings:
    numbers = {"num_experts": m.get("expert_count"), "num_experts_per_tok": m.one("expert_used_count")}
    return numbers | {size_key: m.one("expert_feed_forward_length")} | more


def weights_scale(m: Metadata) -> float:
    """Return the factor of the experts' weights, which files may state as 0 if there is none."""
    return m.get("expert_weights_scale") or 1.0


def llama(m: Metadata) -> Settings:
    if m.find("expert_count"):
        return experts(m, "intermediate_size", architectures=["MixtralForCausalLM"], model_type="mixtral")
    qkv, out, mlp = m.has_bias(), m.has("attn_output.bias"), m.has("ffn_up.bias")
    if qkv == out:
        return {"attention_bias": qkv, "mlp_bias": mlp}
    if out != mlp:
        raise ValueError(f"{m.file.path}: biases of the output of attention without those of the MLP are not supported")
    return {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": qkv, "bias": out}


def deepseek(m: Metadata) -> Settings:
    return experts(
        m,
        first_k_dense_replace=m.get("leading_dense_block_count"),
        n_shared_experts=m.get("expert_shared_count"),
        routed_scaling_factor=weights_scale(m),
    )


def deepseek2(m: Metadata) -> Settings:
    corrected = f"blk.{m.get('leading_dense_block_count')}.exp_probs_b.bias" in m.file.tensors
    if m.find("expert_gating_func") == _SIGMOID or (not m.find("expert_gating_func") and corrected):
        return deepseek_v3(m) | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    if m.find("expert_weights_norm"):  # Mistral Large 3
        return deepseek_v3(m) | {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    method = "group_limited_greedy" if m.get("expert_group_count") > 1 else "greedy"
    return deepseek_v3(m) | {"topk_method": method}


def glm4_moe(m: Metadata) -> Settings:
    return (
        deepseek(m)
        | groups(m)
        | {
            "attention_bias": m.has_bias(),
            "use_qk_norm": m.has("attn_q_norm.weight"),
            "norm_topk_prob": m.get("expert_weights_norm"),
        }
    )


def ernie_moe(m: Metadata) -> Settings:
    return experts(
        m,
        moe_num_shared_experts=m.get("expert_shared_count"),
        moe_layer_start_index=m.get("leading_dense_block_count"),
        moe_layer_interval=m.get("interleave_moe_layer_step"),
    )


def granite_moe(m: Metadata) -> Settings:
    settings = granite(m) | experts(m, "intermediate_size")
    if not (shared := m.get("expert_shared_feed_forward_length")):
        return settings
    return settings | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
        "shared_fused": False,
    }


def hunyuan_moe(m: Metadata) -> Settings:
    shared = m.get("expert_shared_feed_forward_length")
    return experts(m, intermediate_size=shared or m.one("feed_forward_length"))


def qwen2_moe(m: Metadata) -> Settings:
    return experts(m, shared_expert_intermediate_size=m.get("expert_shared_feed_forward_length"))


def gpt_oss(m: Metadata) -> Settings:
    return experts(m, "intermediate_size") | m.listed_windows()


def gemma4(m: Metadata) -> Settings:
    kinds, sizes, heads = m.layer_types(), m.each("feed_forward_length"), m.each("attention.head_count_kv")
    local, wide = (heads[kinds.index(kind)] for kind in (SLIDING, FULL))
    full = kinds.index(FULL)
    dim, size = m.get("attention.key_length"), m.get("attention.key_length_swa")
    theta = m.get("rope.freq_base")
    mixture = experts(m, enable_moe_block=True) if m.find("expert_count") else {}
    return (
        mixture
        | m.listed_windows()
        | {
            "intermediate_size": min(sizes),
            "use_double_wide_mlp": max(sizes) > min(sizes),
            "num_key_value_heads": local,
            "num_global_key_value_heads": wide if wide != local else None,
            "head_dim": size,
            "global_head_dim": dim,
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in m.file.tensors,
            "num_kv_shared_layers": m.get("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight"),
            "final_logit_softcapping": logit_bound(m),
            "partial_rotary_factor": 1.0,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": theta},
                SLIDING: {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa")},
            },
        }
    )


def deepseek_v3(m: Metadata) -> Settings:
    """Return the settings of latent attention, sigmoid scores and groups."""
    return latent(m) | deepseek(m) | groups(m) | {"norm_topk_prob": m.get("expert_weights_norm")}


def index(m: Metadata) -> Settings:
    """Return the settings of the index that chooses keys."""
    return {
        "index_topk": m.get("attention.indexer.top_k"),
        "index_n_heads": m.get("attention.indexer.head_count"),
        "index_head_dim": m.get("attention.indexer.key_length"),
    }


def indexed(m: Metadata) -> Settings:
    return deepseek_v3(m) | index(m)


def glm_dsa(m: Metadata) -> Settings:
    """Return the settings of GLM-5. Files of GLM-5.2, whose context is longer, may not say which layers share the
    choice of an earlier one.
    """
    types = m.find("attention.indexer.types")
    if types:
        shared = {"indexer_types": ["full" if own else "shared" for own in types]}
    else:
        shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3} if m.get("context_length") >= 1 << 20 else {}
    return indexed(m) | shared


def groups(m: Metadata) -> Settings:
    """Return the settings of expert groups, whose count files may state as 0 if there are none."""
    return {"n_group": m.get("expert_group_count") or 1, "topk_group": m.get("expert_group_used_count") or 1}


def exaone_moe(m: Metadata) -> Settings:
    settings = deepseek(m) | groups(m) | m.listed_windows()
    settings["num_shared_experts"] = settings.pop("n_shared_experts")
    return settings | {"norm_topk_prob": m.get("expert_weights_norm")}


def hy_v3(m: Metadata) -> Settings:
    m.check("expert_weights_norm", True)
    m.check("expert_gating_func", _SIGMOID)
    return experts(
        m,
        num_shared_experts=m.get("expert_shared_feed_forward_length") // m.one("expert_feed_forward_length"),
        router_scaling_factor=weights_scale(m),
        attention_bias=m.has_bias(),
    )


def llama4(m: Metadata) -> Settings:
    """Return the settings; those that the file lacks have llama.cpp's defaults."""
    num_layers, num_experts = m.get("block_count"), m.find("expert_count") or 0
    settings = experts(m, "intermediate_size") if num_experts else {"intermediate_size": m.one("feed_forward_length")}
    settings |= {
        "intermediate_size_mlp": m.one("feed_forward_length"),
        "interleave_moe_layer_step": m.get("interleave_moe_layer_step"),
        "use_qk_norm": num_experts != 128,  # Maverick
        "attention_chunk_size": 8192,
    }
    if not num_experts:
        settings["moe_layers"] = []
    if m.find("attention.sliding_window") == 0:  # no layer is chunked, and all rotate
        settings |= {"layer_types": [FULL] * num_layers, "no_rope_layers": [1] * num_layers}
    return settings


def qwen3_moe(m: Metadata) -> Settings:
    return experts(m, norm_topk_prob=True)


def olmoe(m: Metadata) -> Settings:
    return experts(m, "intermediate_size", clip_qkv=m.find("attention.clamp_kqv"))


def afmoe(m: Metadata) -> Settings:
    """Return the settings. llama.cpp scales the embeddings of all of these files."""
    m.check("expert_weights_norm", True)
    return m.listed_windows() | experts(
        m,
        num_dense_layers=m.get("leading_dense_block_count"),
        num_shared_experts=m.get("expert_shared_count"),
        route_scale=weights_scale(m),
        mup_enabled=True,
    )


def dots1(m: Metadata) -> Settings:
    """Return the settings. Files have no windows, and no groups of experts."""
    plain = {"n_group": 1, "topk_group": 1, "sliding_window": None, "attention_bias": m.has_bias()}
    return deepseek(m) | plain | {"norm_topk_prob": m.get("expert_weights_norm")}


def _check_unscaled(m: Metadata) -> None:
    """Raise ValueError if rotary embeddings are scaled."""
    if named_scaling(m):
        scaling = m.get("rope.scaling.type")
        raise ValueError(f"{m.file.path}: {m.kind}.rope.scaling.type {scaling!r} is not supported in these files")


def mellum(m: Metadata) -> Settings:
    _check_unscaled(m)
    local = m.find("rope.freq_base_swa") or m.get("rope.freq_base")
    return (
        qwen3_moe(m)
        | m.listed_windows()
        | {
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": m.get("rope.freq_base")},
                SLIDING: {"rope_type": "default", "rope_theta": local},
            },
        }
    )


def mimo2(m: Metadata) -> Settings:
    kinds, heads = m.layer_types(), m.each("attention.head_count_kv")
    full, local = (heads[kinds.index(kind)] if kind in kinds else 0 for kind in (FULL, SLIDING))
    sparse = m.layers_with("ffn_gate_inp.weight")
    return (
        m.listed_windows()
        | groups(m)
        | experts(
            m,
            num_key_value_heads=full or local,
            swa_num_key_value_heads=local or full,
            v_head_dim=m.find("attention.value_length") or m.rows("blk.0.attn_v.weight") // heads[0],
            attention_value_scale=m.find("attention.value_scale") or 1.0,
            add_swa_attention_sink_bias=bool(m.layers_with("attn_sinks.weight")),
            swa_rope_theta=m.find("rope.freq_base_swa") or m.get("rope.freq_base"),
            mlp_layer_types=["sparse" if i in sparse else "dense" for i in range(len(kinds))],
            routed_scaling_factor=weights_scale(m),
            norm_topk_prob=True,
        )
    )


def step35(m: Metadata) -> Settings:
    """Return the settings. Layers without a window rotate half of each head."""
    kinds, heads, count = m.layer_types(), m.each("attention.head_count"), m.num_layers()
    full, local = (heads[kinds.index(kind)] if kind in kinds else 0 for kind in (FULL, SLIDING))
    theta = {FULL: m.get("rope.freq_base"), SLIDING: m.find("rope.freq_base_swa") or m.get("rope.freq_base")}
    m.check("moe_every_n_layers", 1, 0)
    sparse = range(m.get("leading_dense_block_count"), count)
    limits = {
        name: found if isinstance(found, list) else [found] * count
        for name, key in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp"))
        if (found := m.find(key))
    }
    return (
        m.listed_windows()
        | limits
        | experts(
            m,
            num_attention_heads=full or local,
            num_sliding_attention_heads=local or full,
            share_expert_dim=m.get("expert_shared_feed_forward_length"),
            moe_router_scaling_factor=weights_scale(m),
            norm_expert_weight=m.get("expert_weights_norm"),
            mlp_layer_types=["sparse" if i in sparse else "dense" for i in range(count)],
            partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in kinds],
            rope_theta=[theta[kind] for kind in kinds],
            use_head_wise_attn_gate=m.has("attn_gate.weight"),
        )
    )


def laguna(m: Metadata) -> Settings:
    """Return the settings. Only layers without a window have scaled rotary embeddings."""
    m.check("expert_weights_norm", True)
    m.check("expert_gating_func", _SIGMOID, 0)
    heads, dim, rotary = m.each("attention.head_count"), m.get("attention.key_length"), m.get("rope.dimension_count")
    full = named_scaling(m) or {"rope_type": "default"}
    local = {"rope_type": "default", "rope_theta": m.find("rope.freq_base_swa") or m.get("rope.freq_base")}
    ropes = {
        FULL: full | {"rope_theta": m.get("rope.freq_base"), "partial_rotary_factor": rotary / dim},
        SLIDING: local | {"partial_rotary_factor": (m.find("rope.dimension_count_swa") or rotary) / dim},
    }
    return m.listed_windows(full_first=True) | experts(
        m,
        num_attention_heads=heads[0],
        num_attention_heads_per_layer=heads,
        attention_bias=m.has_bias(),
        gating=_gating(m, heads, dim),
        mlp_layer_types=_kinds_of_mlp(m),
        shared_expert_intermediate_size=m.get("expert_shared_feed_forward_length"),
        moe_routed_scaling_factor=weights_scale(m),
        partial_rotary_factor=1.0,
        rope_parameters=ropes,
    )


def _gating(m: Metadata, heads: list[int], dim: int) -> str:
    """Return how fine the gate of the attended values is. Raises ValueError if that differs from layer to layer."""
    rows = [m.rows(f"blk.{i}.attn_gate.weight") for i in range(len(heads))]
    for name, per_head in (("per-head", 1), ("per-element", dim)):
        if rows == [number * per_head for number in heads]:
            return name
    raise ValueError(f"{m.file.path}: the tensors attn_gate must all have one row per head, or all {dim}, not {rows}")


def _kinds_of_mlp(m: Metadata) -> list[str]:
    dense = m.get("leading_dense_block_count")
    return ["dense" if i < dense else "sparse" for i in range(m.num_layers())]


def dots3(m: Metadata) -> Settings:
    """Return the settings of layers without a window, and as "swa_" those of the others."""
    m.check("expert_gating_func", _SIGMOID)
    _check_unscaled(m)
    kinds, heads, rope = m.layer_types(), m.each("attention.head_count"), m.get("rope.dimension_count")
    full, local = (heads[kinds.index(kind)] if kind in kinds else 0 for kind in (FULL, SLIDING))
    key, local_key = m.get("attention.key_length_mla"), m.get("attention.key_length_mla_swa")
    rank, local_rank = m.get("attention.q_lora_rank"), m.get("attention.kv_lora_rank_swa")
    m.check("attention.key_length_swa", local_rank + rope)
    _check_choosers(m, [kind == FULL for kind in kinds])
    return (
        deepseek(m)
        | groups(m)
        | index(m)
        | {
            "layer_types": kinds,
            "sliding_window": m.get("attention.sliding_window"),
            "use_dsa": True,
            "num_attention_heads": full or local,
            "num_key_value_heads": full or local,
            "head_dim": None,
            "q_lora_rank": rank,
            "kv_lora_rank": m.get("attention.kv_lora_rank"),
            "qk_nope_head_dim": key - rope,
            "qk_rope_head_dim": rope,
            "v_head_dim": m.get("attention.value_length_mla"),
            "swa_num_attention_heads": local or full,
            "swa_num_key_value_heads": local or full,
            "swa_head_dim": local_key,
            "swa_q_lora_rank": rank,
            "swa_kv_lora_rank": local_rank,
            "swa_qk_nope_head_dim": local_key - rope,
            "swa_qk_rope_head_dim": rope,
            "swa_v_head_dim": m.get("attention.value_length_mla_swa"),
            "shared_experts_intermediate_size": m.one("expert_feed_forward_length"),
            "norm_topk_prob": m.get("expert_weights_norm"),
            "partial_rotary_factor": 1.0,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": m.get("rope.freq_base")},
                SLIDING: {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa")},
            },
        }
    )


def _check_choosers(m: Metadata, expected: list[bool]) -> None:
    """Raise ValueError if other layers choose keys than the `expected` ones."""
    types = m.find("attention.indexer.types")
    if types is not None and [bool(own) for own in types[: len(expected)]] != expected:
        raise ValueError(f"{m.file.path}: {m.kind}.attention.indexer.types must be true for layers without a window")


def hy_v4(m: Metadata) -> Settings:
    m.check("expert_gating_func", _SIGMOID, 0)
    owners = m.layers_with("indexer.attn_k.weight")
    types = m.find("attention.indexer.types") or [i in owners for i in range(m.num_layers())]
    return indexed(m) | {
        "indexer_types": ["full" if own else "shared" for own in types],
        "swiglu_limit": m.one("swiglu_clamp_exp"),
        "hc_mult": m.get("hyper_connection.count"),
        "hc_eps": m.get("hyper_connection.epsilon"),
        "hc_magnitude": m.get("hyper_connection.magnitude"),
    }
