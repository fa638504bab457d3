"""Lists the keys that llama.cpp's `load_hparams` reads from a GGUF file's metadata, by architecture: the required ones,
and the defaults of the others. Keys without effect on text are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Keys = dict[str, Any]  # a file's own, without the prefix
REQUIRED, TENSORS = "required", "tensors"  # TENSORS: tensors of other shapes would be refused


class As:
    """Stands for the value of another key of the file."""

    def __init__(self, value: Callable[[Keys], Any]):
        self.value = value


def _head(keys: Keys) -> int:
    heads = keys["attention.head_count"]
    return keys["embedding_length"] // (max(heads) if isinstance(heads, list) else heads)


def _recurrent(keys: Keys) -> list[bool]:
    return [(i + 1) % keys.get("full_attention_interval", 4) != 0 for i in range(keys["block_count"])]


_RMS = {"attention.layer_norm_rms_epsilon": REQUIRED}
_NORM = {"attention.layer_norm_epsilon": REQUIRED}
_SCALES = dict.fromkeys(("residual_scale", "embedding_scale", "attention.scale"), 0.0)
_SAME_THETA = {"rope.freq_base_swa": As(lambda keys: keys.get("rope.freq_base", 10000.0))}
_LOCAL_THETA = {"rope.freq_base_swa": 10000.0}
_WEIGHTS = {"expert_weights_scale": 0.0, "expert_weights_norm": False}
_EXPERTS = {"expert_feed_forward_length": TENSORS, "expert_shared_feed_forward_length": TENSORS}
_SHARED = {"expert_shared_count": TENSORS, "leading_dense_block_count": TENSORS}
_MLA = {
    "attention.q_lora_rank": TENSORS,
    "attention.kv_lora_rank": TENSORS,
    "attention.key_length_mla": TENSORS,
    "attention.value_length_mla": TENSORS,
    "attention.key_length": TENSORS,
    "attention.value_length": TENSORS,
    "rope.dimension_count": TENSORS,
}
_SSM = dict.fromkeys((f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank")), REQUIRED)
_SSM2 = _SSM | {"ssm.group_count": REQUIRED}
_NO_HEADS = {"attention.head_count": 0, "attention.key_length": TENSORS, "rope.dimension_count": TENSORS}
_DELTA = _RMS | _SSM2 | {"attention.recurrent_layers": As(_recurrent), "full_attention_interval": 4}
_GRANITE = _RMS | _SCALES | {"logit_scale": 0.0, "rope.scaling.finetuned": True} | _EXPERTS
_NEMOTRON_H = _SSM2 | _EXPERTS | _WEIGHTS | {"expert_shared_count": TENSORS, "moe_latent_size": TENSORS}
_DEEPSEEK2 = _RMS | _MLA | _EXPERTS | _WEIGHTS | _SHARED | {"expert_gating_func": TENSORS} | {
    "rope.scaling.yarn_log_multiplier": 0.0, "attention.temperature_scale": 0.0,
}  # fmt: skip
_INDEX = {f"attention.indexer.{key}": REQUIRED for key in ("top_k", "head_count", "key_length")}
_INDEXED = _RMS | _MLA | _EXPERTS | _WEIGHTS | _SHARED | _INDEX
_BERT = _NORM | {"attention.causal": False}  # llama.cpp takes true, with which no encoder works

# of all architectures
EVERY: Keys = {
    "context_length": REQUIRED,
    "embedding_length": REQUIRED,
    "block_count": REQUIRED,
    "vocab_size": TENSORS,
    "nextn_predict_layers": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "feed_forward_length": TENSORS,
    "attention.head_count": REQUIRED,
    "attention.head_count_kv": TENSORS,
    "attention.key_length": As(_head),
    "attention.value_length": TENSORS,
    "attention.causal": True,
    "rope.dimension_count": As(lambda keys: keys.get("attention.key_length", _head(keys))),
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": As(lambda keys: keys["context_length"]),
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "pooling_type": 0,
}
OWN: dict[str, Keys] = {
    # without a window, layers would rotate that the family does not rotate
    "afmoe": _RMS | _EXPERTS | _SHARED | _WEIGHTS | {"attention.sliding_window": REQUIRED},
    "arcee": _RMS,
    "bailingmoe3": _RMS | _MLA | _EXPERTS | _WEIGHTS | _SHARED | {
        "ssm.conv_kernel": REQUIRED, "kda.head_dim": REQUIRED, "kda.safe_gate": True,
        "kda.gate_lower_bound": REQUIRED, "swiglu_clamp_exp": 0.0, "swiglu_clamp_shexp": 0.0,
    },
    "bert": _BERT,
    "chatglm": _RMS,
    "cohere2": _NORM | _SAME_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": 4, "logit_scale": REQUIRED,
    },
    "command-r": _NORM | {"logit_scale": 1.0},  # 0 is no scale
    "deepseek": _RMS | _EXPERTS | _SHARED | {"expert_weights_scale": 0.0},
    "deepseek2": _DEEPSEEK2,
    "deepseek2-ocr": _RMS | _EXPERTS | _SHARED | _WEIGHTS | {"expert_gating_func": 1},
    "deepseek32": _INDEXED | {"expert_gating_func": REQUIRED},
    "dots1": _RMS | _EXPERTS | _SHARED | _WEIGHTS,
    "dots3note": _INDEXED | {
        "expert_gating_func": REQUIRED, "attention.sliding_window": REQUIRED, "rope.freq_base_swa": REQUIRED,
        "attention.sliding_window_pattern": REQUIRED, "attention.kv_lora_rank_swa": REQUIRED,
        "attention.key_length_mla_swa": REQUIRED, "attention.value_length_mla_swa": REQUIRED,
    },
    "ernie4_5": _RMS,
    "ernie4_5-moe": _RMS | _EXPERTS | _SHARED | {"interleave_moe_layer_step": TENSORS},
    "exaone-moe": _RMS | _EXPERTS | _SHARED | _WEIGHTS | _SAME_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": 4, "expert_gating_func": REQUIRED,
    },
    "exaone4": _RMS | {"attention.sliding_window": 0},
    "falcon-h1": _RMS | _SSM2,
    "gemma": _RMS,
    "gemma-embedding": _RMS | _LOCAL_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": 6, "attention.causal": False,
    },
    "gemma2": _RMS | _SAME_THETA | {
        "attention.sliding_window": 4096, "attention.sliding_window_pattern": 2, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": _RMS | _LOCAL_THETA | {
        "attention.sliding_window": 0, "attention.sliding_window_pattern": 6, "final_logit_softcapping": 0.0,
    },
    "gemma3n": _RMS | _LOCAL_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": 5, "final_logit_softcapping": 30.0,
        # not read: constants of the published models
        "attention.shared_kv_layers": As(lambda keys: max(0, keys["block_count"] - 20)),
        "altup.active_idx": 0,
        "altup.num_inputs": TENSORS,
        "embedding_length_per_layer_input": TENSORS,
        "activation_sparsity_scale": As(
            lambda keys: [1.6448533535003662 if i < 10 else float("-inf") for i in range(keys["block_count"])]),
    },
    "gemma4": _RMS | _EXPERTS | _LOCAL_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": REQUIRED,
        "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": TENSORS,
        "attention.key_length_swa": REQUIRED, "final_logit_softcapping": 30.0,
    },
    "glm-dsa": _INDEXED | {"expert_gating_func": 2},
    "glm4": _RMS,
    "glm4moe": _RMS | _EXPERTS | _SHARED | _WEIGHTS | {"expert_gating_func": 2},
    "glm5-next": _RMS | _MLA | _EXPERTS | _SHARED | _WEIGHTS | _INDEX | {
        "ssm.conv_kernel": REQUIRED, "kda.head_dim": REQUIRED, "expert_gating_func": 2,
        "swiglu_clamp_exp": 0.0, "swiglu_clamp_shexp": As(lambda keys: keys["swiglu_clamp_exp"]),
        "attention.indexer.kpool_select_tail": True, "attention.indexer.kpool": REQUIRED,
        "hyper_connection.count": REQUIRED, "hyper_connection.sinkhorn_iterations": REQUIRED,
        "hyper_connection.epsilon": REQUIRED,
    },
    "gpt-oss": _RMS | _EXPERTS | _SAME_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": 2,
    },
    "gpt2": _NORM,
    "granite": _GRANITE,
    "granite_swa": _GRANITE | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": REQUIRED,
        "attention.rope_pattern": As(lambda keys: [True] * keys["block_count"]),
    },
    "granitehybrid": _GRANITE | _SSM2,
    "granitemoe": _GRANITE,
    "hunyuan-dense": _RMS,
    "hunyuan-moe": _RMS | _EXPERTS,
    "hy_v3": _RMS | _EXPERTS | _WEIGHTS | {"expert_gating_func": 2},
    "hy_v4": _INDEXED | {
        "expert_gating_func": 2, "swiglu_clamp_exp": 0.0, "hyper_connection.count": REQUIRED,
        "hyper_connection.epsilon": REQUIRED, "hyper_connection.magnitude": REQUIRED,
    },
    "jais2": _NORM,
    "jamba": _RMS | _SSM,
    "kimi-linear": _RMS | _MLA | _EXPERTS | _SHARED | {
        "ssm.conv_kernel": REQUIRED, "kda.head_dim": REQUIRED, "expert_weights_scale": 0.0,
        "expert_gating_func": REQUIRED,
    },
    "laguna": _RMS | _EXPERTS | _WEIGHTS | _SAME_THETA | {
        "leading_dense_block_count": TENSORS, "expert_gating_func": 2,
        "attention.sliding_window": 0, "attention.sliding_window_pattern": 4,
        "rope.dimension_count_swa": As(lambda keys: keys.get("rope.dimension_count", 16)),
    },
    "lfm2": _RMS | {"shortconv.l_cache": REQUIRED, "attention.sliding_window": 0},
    "lfm2moe": _RMS | _EXPERTS | {
        "shortconv.l_cache": REQUIRED, "leading_dense_block_count": TENSORS, "expert_gating_func": REQUIRED,
    },
    "llama": _RMS,
    "llama4": _RMS | _EXPERTS | _SAME_THETA | {"interleave_moe_layer_step": TENSORS},
    "mamba": _RMS | _SSM | _NO_HEADS | {"ssm.dt_b_c_rms": False},
    "mamba2": _RMS | _SSM2 | _NO_HEADS,
    "mellum": _RMS | _EXPERTS | _SAME_THETA | {"attention.sliding_window": 0, "attention.sliding_window_pattern": 4},
    "mimo2": _RMS | _EXPERTS | _SAME_THETA | {
        "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": REQUIRED,
        "attention.value_scale": 0.0, "expert_weights_scale": 0.0,
    },
    "minicpm3": _RMS | _MLA,
    "minimax-01": _RMS | _EXPERTS | {"residual_scale": REQUIRED, "attention.recurrent_layers": TENSORS},
    "minimax-m2": _RMS | _EXPERTS,
    "mistral3": _RMS | {"attention.temperature_scale": 0.0, "rope.scaling.yarn_log_multiplier": 0.0},
    "mistral4": _DEEPSEEK2,
    "modern-bert": _BERT | _LOCAL_THETA | {
        "attention.sliding_window": 0, "attention.sliding_window_pattern": 3, "hidden_activation": "gelu",
        "classifier.pooling_type": 1,
    },
    "nemotron": _NORM,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "nomic-bert": _BERT,
    "olmo2": _RMS | _SAME_THETA | {"attention.sliding_window": 0, "attention.sliding_window_pattern": 4},
    "olmoe": _RMS | _EXPERTS,
    "phi3": _RMS | {"attention.sliding_window": 0},
    "plamo2": _RMS | _SSM2,
    "plamo3": _RMS | _LOCAL_THETA | {"attention.sliding_window": 0, "attention.sliding_window_pattern": 8},
    "qwen2": _RMS,
    "qwen2moe": _RMS | _EXPERTS,
    "qwen2vl": _RMS,
    "qwen3": _RMS,
    "qwen35": _DELTA,
    "qwen35moe": _DELTA | _EXPERTS,
    "qwen3moe": _RMS | _EXPERTS,
    "qwen3next": _DELTA | _EXPERTS,
    "qwen3vl": _RMS,
    "qwen3vlmoe": _RMS | _EXPERTS,
    "seed_oss": _RMS,
    "smollm3": _RMS,
    "step35": _RMS | _EXPERTS | _WEIGHTS | _SAME_THETA | {
        "leading_dense_block_count": TENSORS,
        "expert_gating_func": 2, "attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": REQUIRED,
        "swiglu_clamp_exp": 0.0, "swiglu_clamp_shexp": 0.0,
    },
    "starcoder2": _NORM,
}  # fmt: skip


def keys_of(architecture: str) -> Keys:
    """Return the keys that `load_hparams` reads for an architecture, with their defaults."""
    return EVERY | OWN[architecture]
