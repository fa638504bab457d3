"""Types and ranges of the keys of config.json, checked once, before anything is computed from them. Torch-free.

Other keys are checked by the code that reads them. null is always allowed and stands for a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoints.rules import FLAG, MAX_LAYERS, OBJECT, TEXT, TEXTS, Kind, Number, Rule, Whole, printable

TEXT_PARTS = ("text_config", "language_config", "llm_config")  # for wrappers that add an encoder to a language model
_PARTS = (*TEXT_PARTS, "linear_attn_config")
_DEEPEST = 64  # nested objects and lists


_SIZE, _COUNT, _POSITIONS = Whole(1, 1 << 20), Whole(0, 1 << 16), Whole(1, (1 << 31) - 1)
_TOKENS = Kind("a token id or a list of them", (int, list), (int,))
_EPSILON, _FACTOR = Number(0, 1), Number(-1e9, 1e9)

# for layers with recurrent states
_STATE_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim", "conv_L_cache", "n_groups", "state_size",
    "conv_kernel", "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "mamba_n_heads", "mamba_n_groups",
    "mamba_d_state", "mamba_d_conv", "mamba_ngroups", "num_heads", "short_conv_kernel_size",
)  # fmt: skip

KEYS: dict[str, Rule] = {
    "architectures": TEXTS,
    "model_type": TEXT,
    "vocab_size": Whole(1, 1 << 24),
    "hidden_size": _SIZE,
    "intermediate_size": Whole(0, 1 << 24, per_layer=True),
    "moe_intermediate_size": Whole(0, 1 << 24, per_layer=True),
    "shared_intermediate_size": Whole(0, 1 << 24),
    "shared_expert_intermediate_size": Whole(0, 1 << 24),
    "num_hidden_layers": Whole(1, MAX_LAYERS),
    "num_attention_heads": Whole(1, 1 << 14, per_layer=True),
    "num_key_value_heads": Whole(1, 1 << 14, per_layer=True),
    "head_dim": Whole(0, 1 << 14),
    **dict.fromkeys(_STATE_SIZES, _SIZE),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "mamba_d_head"), Whole(1, 1 << 20, auto=True)),
    **dict.fromkeys(("expand", "mamba_expand"), Number(1e-3, 1 << 10)),
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": Whole(0, (1 << 31) - 1),
    "max_window_layers": Whole(0, MAX_LAYERS),
    "layer_types": Kind("a list of texts", (list,), (str,)),
    "tie_word_embeddings": FLAG,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "dtype": TEXT,
    "torch_dtype": TEXT,
    "rms_norm_eps": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "norm_eps": _EPSILON,
    "norm_epsilon": _EPSILON,
    "rope_theta": Number(1e-3, 1e15, per_layer=True),  # Step 3.5
    "partial_rotary_factor": Number(0, 1),
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "quantization_config": OBJECT,
    "compression_config": OBJECT,
    "vision_config": OBJECT,
    "id2label": OBJECT,
    "num_labels": Whole(1, 1 << 16),
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "n_routed_experts": _COUNT,
    "n_shared_experts": _COUNT,
    "num_experts_per_tok": Whole(0, 1 << 16, per_layer=True),
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "first_k_dense_replace": Whole(0, MAX_LAYERS),
    "q_lora_rank": Whole(0, 1 << 20),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": Whole(0, 1 << 14),
    "qk_rope_head_dim": Whole(0, 1 << 14),
    "v_head_dim": Whole(0, 1 << 14),
    "num_nextn_predict_layers": Whole(0, MAX_LAYERS),
    "mtp_num_hidden_layers": Whole(0, MAX_LAYERS),
    "type_vocab_size": Whole(0, 1 << 20),
    "bos_token_id": _TOKENS,
    "eos_token_id": _TOKENS,
    "pad_token_id": Whole(-1, (1 << 31) - 1),
    "logit_scale": _FACTOR,
    "logits_scaling": _FACTOR,
    "embedding_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "routed_scaling_factor": _FACTOR,
    "final_logit_softcapping": _FACTOR,
    "attn_logit_softcapping": _FACTOR,
}

# Ranges of an encoder's whole numbers, by the end of their keys, which differ by family. They are sizes of modules and
# tables.
_ENCODERS = ("vision_config", "audio_config")
_ENDS: dict[str, Rule] = {
    "layers": Whole(0, MAX_LAYERS),
    "depth": Whole(0, MAX_LAYERS),
    "patch_size": Whole(1, 1 << 12),
    "merge_size": Whole(1, 1 << 10),
    "heads": Whole(1, 1 << 14),
    "image_size": Whole(1, 1 << 14),
    "scale_factor": Whole(1, 1 << 10),
    "hidden_size": Whole(1, 1 << 16),
    "kernel_size": Whole(1, 1 << 10),
    "_size": Whole(-1, 1 << 20),
    "_dim": Whole(0, 1 << 16),
    "channels": Whole(1, 1 << 12),
    "positions": Whole(0, 1 << 20),
    "embeddings": Whole(0, 1 << 20),
}


def unwrapped(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json with the parts of its thinker (Qwen3-ASR, Qwen-Omni) at the top level."""
    thinker = raw.get("thinker_config")
    return {**thinker, **raw} if isinstance(thinker, dict) else raw


def check_config(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError naming the file, key and valid values, for the first key of another type or range."""
    _check_depth(raw, path)
    _check_values(raw, KEYS, "", path)
    for name in (*_PARTS, *_ENCODERS):
        values = raw.get(name)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise ValueError(f"{path}: {name} must be an object, not {printable(values)}")
        if name in _ENCODERS:
            _check_encoder(values, name, path)
        else:
            _check_values(values, KEYS, f"{name}.", path)


def _check_encoder(value: Any, place: str, path: Path) -> None:
    """Raise ValueError for the first whole number below `value`, an encoder's, that is out of range."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_encoder(inner, f"{place}.{key}", path)
    elif isinstance(value, list):
        for inner in value:
            _check_encoder(inner, place, path)
    elif isinstance(value, int) and not isinstance(value, bool):
        rule = next((rule for end, rule in _ENDS.items() if place.endswith(end)), None)
        if rule is not None and not rule.fits(value):
            raise ValueError(f"{path}: {place} must be {rule}, not {printable(value)}")


def _check_values(values: Mapping[str, Any], rules: Mapping[str, Rule], part: str, path: Path) -> None:
    for key, value in values.items():
        rule = rules.get(key)
        if rule is not None and value is not None and not rule.fits(value):
            raise ValueError(f"{path}: {part}{key} must be {rule}, not {printable(value)}")


def _check_depth(raw: Any, path: Path) -> None:
    level, depth = [raw], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"{path} is nested more than {_DEEPEST} levels deep")
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [entry for values in inner for entry in values if isinstance(entry, dict | list)]
