"""Names and settings of config.json from the metadata of GGUF files: decoders with recurrent states. Torch-free."""

from __future__ import annotations

from quire.checkpoints.gguf.experts import experts, groups, index, weights_scale
from quire.checkpoints.gguf.metadata import FULL, Metadata, Settings
from quire.checkpoints.gguf.names import PRE, SANDWICH
from quire.checkpoints.gguf.settings import granite, latent

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
NEXT = DELTA | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
_MAMBA = PRE | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a.weight": "mamba.A_log",
    "ssm_d.weight": "mamba.D",
    "ssm_out": "mamba.out_proj",
}
MAMBA1 = _MAMBA | {
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
MAMBA2 = _MAMBA | {"ssm_dt.bias": "mamba.dt_bias", "ssm_norm": "mamba.norm"}
NEMOTRON = MAMBA2 | {"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"}
KIMI = PRE | {
    **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_a.weight": "self_attn.A_log",
    "ssm_norm": "self_attn.o_norm",
}


PLAMO = SANDWICH | {"ffn_up": "mlp.gate_up_proj"}
PLAMO2 = PLAMO | {
    "ssm_in": "self_attn.in_proj",
    "ssm_conv1d": "self_attn.conv1d",
    "ssm_x": "self_attn.bcdt_proj",
    "ssm_dt.weight": "self_attn.dt_proj.weight",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_dt_norm.weight": "self_attn.dt_norm_weight",
    "ssm_b_norm.weight": "self_attn.B_norm_weight",
    "ssm_c_norm.weight": "self_attn.C_norm_weight",
    "ssm_a.weight": "self_attn.A_log",
    "ssm_d.weight": "self_attn.D",
    "ssm_out": "self_attn.out_proj",
}
# norms that files of PLaMo store as offset + w where safetensors have w, by the ends of their names
AFTER_MIXER, AFTER_MLP = "post_attention_layernorm", "post_feedforward_layernorm"
PLAMO_OFFSETS = {AFTER_MIXER: 1 / 5, AFTER_MLP: 1 / 5**1.5}


_HYPER = ("fn", "base", "scale")
LING = KIMI | {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"}


GLM5_NEXT = KIMI | {f"hc_{half}_{name}.weight": f"hc_{half}_{name}" for half in ("attn", "ffn") for name in _HYPER}
MINIMAX_STATES = {
    "attn_norm_2": "self_attn.norm",
    "attn_gate": "self_attn.output_gate",
    "attn_output": "self_attn.out_proj",
}


def _attending(m: Metadata, others: str) -> Settings:
    """Return the kinds of layers: those without KV heads do not attend."""
    heads = m.each("attention.head_count_kv")
    return {"layer_types": [FULL if number else others for number in heads], "num_key_value_heads": max(1, *heads)}


def lfm2(m: Metadata) -> Settings:
    m.check("attention.sliding_window", 0)
    own = {"conv_L_cache": m.get("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    return _attending(m, "conv") | own | {"conv_bias": "blk.0.shortconv.conv.bias" in m.file.tensors}


def lfm2_moe(m: Metadata) -> Settings:
    m.check("expert_gating_func", _SIGMOID)
    return lfm2(m) | experts(
        m,
        num_dense_layers=m.get("leading_dense_block_count"),
        use_expert_bias=any(name.endswith("exp_probs_b.bias") for name in m.file.tensors),
        norm_topk_prob=m.get("expert_weights_norm"),
        routed_scaling_factor=weights_scale(m),
        intermediate_size=m.one("feed_forward_length"),
    )


def qwen35(m: Metadata) -> Settings:
    heads, interval, count = m.get("ssm.time_step_rank"), m.get("full_attention_interval"), m.num_layers()
    recurrent = m.find("attention.recurrent_layers") or [(i + 1) % interval for i in range(count)]
    return {
        "layer_types": [STATE if one else FULL for one in recurrent[:count]],
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


def qwen3_next(m: Metadata) -> Settings:
    """Return the settings. Older files have q, k, v and z of each key head together, as safetensors do."""
    grouped = m.has("ssm_in.weight")
    return qwen35_moe(m) | {"linear_tiled_heads": False, "linear_grouped": grouped, "norm_topk_prob": True}


def _without_attention(m: Metadata) -> Settings:
    return {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 1,
        "intermediate_size": m.get("ssm.inner_size"),
        "partial_rotary_factor": 1.0,
        "rope_parameters": {},
        "max_position_embeddings": m.get("context_length"),
    }


def mamba(m: Metadata) -> Settings:
    falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return (
        _without_attention(m)
        | {
            "state_size": m.get("ssm.state_size"),
            "time_step_rank": m.get("ssm.time_step_rank"),
            "conv_kernel": m.get("ssm.conv_kernel"),
            "use_conv_bias": m.has("ssm_conv1d.bias"),
            "use_bias": m.has("ssm_in.bias"),
        }
        | (falcon if m.get("ssm.dt_b_c_rms") else {})
    )


def jamba(m: Metadata) -> Settings:
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in m.file.tensors for i in range(m.get("block_count"))]
    mixture = experts(m, "intermediate_size") if any(sparse) else {"num_experts": 1}
    return (
        _attending(m, "mamba")
        | mixture
        | {
            "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
            "mamba_d_state": m.get("ssm.state_size"),
            "mamba_d_conv": m.get("ssm.conv_kernel"),
            "mamba_dt_rank": m.get("ssm.time_step_rank"),
            "mamba_expand": m.get("ssm.inner_size") / m.get("embedding_length"),
            "mamba_conv_bias": _somewhere(m, "ssm_conv1d.bias"),
            "mamba_proj_bias": _somewhere(m, "ssm_in.bias"),
        }
    )


def _somewhere(m: Metadata, tensor: str) -> bool:
    """Return whether a layer has the tensor."""
    return any(name.endswith(f".{tensor}") for name in m.file.tensors)


def nemotron_h(m: Metadata) -> Settings:
    """Read the kind of each layer: it attends if it has KV heads, and is an MLP or a mixture if it has a width."""
    heads, widths = m.each("attention.head_count_kv"), m.each("feed_forward_length")
    kinds, dense = [], set()
    for i, (number, width) in enumerate(zip(heads, widths)):
        if f"blk.{i}.ffn_gate_inp.weight" in m.file.tensors:
            kinds.append("moe")
        elif width and not number:
            kinds.append("mlp")
            dense.add(width)
        else:
            kinds.append(FULL if number else STATE)
    if len(dense) > 1:
        raise ValueError(f"{m.file.path}: MLPs of different widths are not supported: {sorted(dense)}")
    mamba_heads, sizes = _mamba2(m)
    found = {
        "layer_types": kinds,
        "num_key_value_heads": max(1, *heads),
        "intermediate_size": max(dense, default=1),
        "ssm_state_size": m.get("ssm.state_size"),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": sizes["head_dim"],
        "n_groups": m.get("ssm.group_count"),
        "conv_kernel": m.get("ssm.conv_kernel"),
        "use_conv_bias": _somewhere(m, "ssm_conv1d.bias"),
        "use_bias": _somewhere(m, "ssm_in.bias"),
        "attention_bias": _somewhere(m, "attn_q.bias"),
        "mlp_bias": _somewhere(m, "ffn_up.bias"),
    }
    if "moe" not in kinds:
        return found
    return (
        found
        | experts(m)
        | groups(m)
        | {
            "moe_shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
            "n_shared_experts": m.get("expert_shared_count"),
            "norm_topk_prob": m.get("expert_weights_norm"),
            "routed_scaling_factor": weights_scale(m),
            "moe_latent_size": m.get("moe_latent_size") or None,
        }
    )


def falcon_h1(m: Metadata) -> Settings:
    """Return the settings. All multipliers are part of the weights."""
    heads, sizes = _mamba2(m)
    return {
        "mamba_d_ssm": m.get("ssm.inner_size"),
        "mamba_n_heads": heads,
        "mamba_d_head": sizes["head_dim"],
        "mamba_expand": sizes["expand"],
        "mamba_d_state": m.get("ssm.state_size"),
        "mamba_n_groups": m.get("ssm.group_count"),
        "mamba_d_conv": m.get("ssm.conv_kernel"),
        "mamba_conv_bias": m.has("ssm_conv1d.bias"),
        "mamba_proj_bias": m.has("ssm_in.bias"),
        "projectors_bias": m.has("ssm_out.bias"),
        "attention_bias": m.has("attn_q.bias"),
        "mlp_bias": m.has("ffn_up.bias"),
        "mamba_rms_norm": m.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def bailing3(m: Metadata) -> Settings:
    return kimi_linear(m) | {
        "kda_safe_gate": m.get("kda.safe_gate"),
        "kda_lower_bound": m.get("kda.gate_lower_bound"),
    }


def glm5_next(m: Metadata) -> Settings:
    limits = {limit for key in ("exp", "shexp") for limit in m.each(f"swiglu_clamp_{key}")}
    if len(limits) > 1:
        raise ValueError(f"{m.file.path}: {m.kind}.swiglu_clamp_exp and swiglu_clamp_shexp must be one number")
    m.check("attention.indexer.kpool_select_tail", True)
    m.find("attention.indexer.types")
    return kimi_linear(m) | index(m) | {
        "index_kpool": m.get("attention.indexer.kpool"),
        "linear_lower_bound": m.find("kda.gate_lower_bound"),
        "swiglu_limit": limits.pop() or None,
        "hc_mult": m.get("hyper_connection.count"),
        "hc_sinkhorn_iters": m.get("hyper_connection.sinkhorn_iterations"),
        "hc_eps": m.get("hyper_connection.epsilon"),
    }


def minimax(m: Metadata) -> Settings:
    """Return the settings. Files have one factor for the residual stream, and none for the results."""
    layers = range(m.get("block_count"))
    recurrent = [f"blk.{i}.attn_norm_2.weight" in m.file.tensors for i in layers]
    interval, declared = m.find("full_attention_interval"), m.find("attention.recurrent_layers")
    if interval and not declared:
        declared = [(i + 1) % interval != 0 for i in layers]
    if declared and [*map(bool, declared)] != recurrent:
        raise ValueError(f"{m.file.path}: {m.kind}.attention.recurrent_layers or full_attention_interval does not fit")
    factors = {f"{name}_alpha_factor": m.get("residual_scale") for name in ("full_attn", "linear_attn", "mlp")}
    rotary = {"rotary_dim": m.get("rope.dimension_count")}
    return experts(m, "intermediate_size") | factors | rotary | {"attn_type_list": [int(not one) for one in recurrent]}


def kimi_linear(m: Metadata) -> Settings:
    m.check("expert_gating_func", _SIGMOID)
    heads, dim = m.one("attention.head_count"), m.get("kda.head_dim")
    return (
        _attending(m, STATE)
        | latent(m)
        | experts(m)
        | groups(m)
        | {
            "num_key_value_heads": heads,
            "first_k_dense_replace": m.get("leading_dense_block_count"),
            "n_shared_experts": m.get("expert_shared_count"),
            "norm_topk_prob": m.get("expert_weights_norm"),
            "routed_scaling_factor": weights_scale(m),
            "linear_head_dim": dim,
            "linear_num_heads": heads,
            "linear_conv_kernel_dim": m.get("ssm.conv_kernel"),
        }
    )


def _mamba2(m: Metadata) -> tuple[int, Settings]:
    heads, inner = m.get("ssm.time_step_rank"), m.get("ssm.inner_size")
    return heads, {"head_dim": inner // heads, "expand": inner / m.get("embedding_length")}


def mamba2(m: Metadata) -> Settings:
    heads, sizes = _mamba2(m)
    return (
        _without_attention(m)
        | sizes
        | {
            "num_heads": heads,
            "state_size": m.get("ssm.state_size"),
            "n_groups": m.get("ssm.group_count"),
            "conv_kernel": m.get("ssm.conv_kernel"),
            "use_conv_bias": m.has("ssm_conv1d.bias"),
            "use_bias": m.has("ssm_in.bias"),
        }
    )


def granite_hybrid(m: Metadata) -> Settings:
    heads, sizes = _mamba2(m)
    shared = m.get("expert_shared_feed_forward_length")
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
            "position_embedding_type": "rope" if m.get("rope.scaling.finetuned") else None,
            "mamba_n_heads": heads,
            "mamba_d_head": sizes["head_dim"],
            "mamba_expand": sizes["expand"],
            "mamba_d_state": m.get("ssm.state_size"),
            "mamba_n_groups": m.get("ssm.group_count"),
            "mamba_d_conv": m.get("ssm.conv_kernel"),
            "mamba_conv_bias": _somewhere(m, "ssm_conv1d.bias"),
            "mamba_proj_bias": _somewhere(m, "ssm_in.bias"),
        }
    )


def plamo2(m: Metadata) -> Settings:
    """Return the settings. Files lack the window of attention: it is that of the published models."""
    attends = [kind == FULL for kind in _attending(m, STATE)["layer_types"]]
    count = len(attends)
    steps = [step for step in range(2, 2 * count + 2) if plamo2_attends(count, step) == attends]
    if not steps:
        raise ValueError(f"{m.file.path}: {m.kind}.attention.head_count_kv does not follow one period")
    return {
        "hidden_size_per_head": m.get("attention.key_length"),
        "num_key_value_heads": m.one("attention.head_count_kv"),
        "mamba_step": steps[0],
        "mamba_d_state": m.get("ssm.state_size"),
        "mamba_d_conv": m.get("ssm.conv_kernel"),
        "mamba_num_heads": m.get("ssm.time_step_rank"),
    }


def plamo2_attends(num_layers: int, step: int) -> list[bool]:
    """Return which layers of a PLaMo 2 attend: one in `step`, or the last."""
    if num_layers <= step // 2:
        return [i == num_layers - 1 for i in range(num_layers)]
    return [i % step == step // 2 for i in range(num_layers)]


def plamo3(m: Metadata) -> Settings:
    return m.listed_windows() | {"rope_local_theta": m.get("rope.freq_base_swa")}
