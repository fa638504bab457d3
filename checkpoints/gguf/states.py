"""Names and settings of config.json by the metadata of GGUF files: decoders with recurrent states. Torch-free."""

from __future__ import annotations

from quire.checkpoints.gguf.experts import experts
from quire.checkpoints.gguf.metadata import FULL, Metadata, Settings
from quire.checkpoints.gguf.names import PRE
from quire.checkpoints.gguf.settings import granite

STATE = "linear_attention"
_SIGMOID = 2  # expert_gating_func

SHORT_CONV = PRE | {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
DELTA = PRE | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a.weight": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MAMBA2 = PRE | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a.weight": "mamba.A_log",
    "ssm_d.weight": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}


def _attending(m: Metadata, others: str) -> Settings:
    """The kinds of layers: those without KV heads do not attend."""
    heads = m.get("attention.head_count_kv")
    if not isinstance(heads, list):
        raise ValueError(f"{m.file.path}: {m.kind}.attention.head_count_kv must be a list, one entry per layer")
    return {"layer_types": [FULL if number else others for number in heads], "num_key_value_heads": max(heads)}


def lfm2(m: Metadata) -> Settings:
    own = {"conv_L_cache": m.get("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    return _attending(m, "conv") | own | {"conv_bias": "blk.0.shortconv.conv.bias" in m.file.tensors}


def lfm2_moe(m: Metadata) -> Settings:
    m.check("expert_gating_func", _SIGMOID)
    return lfm2(m) | experts(
        m,
        num_dense_layers=m.get("leading_dense_block_count", 0),
        use_expert_bias=any(name.endswith("exp_probs_b.bias") for name in m.file.tensors),
        norm_topk_prob=m.get("expert_weights_norm", True),
        routed_scaling_factor=m.get("expert_weights_scale", 1.0),
        intermediate_size=m.one("feed_forward_length"),
    )


def qwen35(m: Metadata) -> Settings:
    heads, interval = m.get("ssm.time_step_rank"), m.get("full_attention_interval", 4)
    layers = range(m.get("block_count") - m.get("nextn_predict_layers", 0))
    return {
        "layer_types": [STATE if (i + 1) % interval else FULL for i in layers],
        "linear_num_key_heads": m.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": m.get("ssm.state_size"),
        "linear_value_head_dim": m.get("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": m.get("ssm.conv_kernel"),
        "linear_tiled_heads": True,
    }


def qwen35_moe(m: Metadata) -> Settings:
    shared = m.get("expert_shared_feed_forward_length")
    return qwen35(m) | experts(m, shared_expert_intermediate_size=shared)


def _mamba2(m: Metadata) -> tuple[int, Settings]:
    heads, inner = m.get("ssm.time_step_rank"), m.get("ssm.inner_size")
    return heads, {"head_dim": inner // heads, "expand": inner / m.get("embedding_length")}


def mamba2(m: Metadata) -> Settings:
    heads, sizes = _mamba2(m)
    return sizes | {
        "num_heads": heads,
        "state_size": m.get("ssm.state_size"),
        "n_groups": m.get("ssm.group_count"),
        "conv_kernel": m.get("ssm.conv_kernel"),
        "use_conv_bias": m.has("ssm_conv1d.bias"),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": m.get("ssm.inner_size"),
        "partial_rotary_factor": 1.0,
        "rope_parameters": {},
        "max_position_embeddings": m.get("context_length"),
    }


def granite_hybrid(m: Metadata) -> Settings:
    heads, sizes = _mamba2(m)
    shared = m.find("expert_shared_feed_forward_length") or 0
    mixture = experts(m, "intermediate_size") if m.find("expert_count") else {"num_experts": 0}
    layers = _attending(m, "mamba")
    attending = layers["layer_types"].index(FULL) if FULL in layers["layer_types"] else 0
    return (
        granite(m)
        | layers
        | mixture
        | {
            "attention_bias": f"blk.{attending}.attn_q.bias" in m.file.tensors,
            "shared_intermediate_size": shared or m.one("feed_forward_length"),
            "shared_fused": False,
            "position_embedding_type": "rope" if m.find("rope.scaling.finetuned") else None,
            "mamba_n_heads": heads,
            "mamba_d_head": sizes["head_dim"],
            "mamba_expand": sizes["expand"],
            "mamba_d_state": m.get("ssm.state_size"),
            "mamba_n_groups": m.get("ssm.group_count"),
            "mamba_d_conv": m.get("ssm.conv_kernel"),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.file.tensors),
        }
    )
