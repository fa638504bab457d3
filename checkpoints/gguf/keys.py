"""Every key of a GGUF file that llama.cpp reads for a served architecture: its valid values and its effect here.
`check_types` looks at all of them before anything is computed; `refuse_unread` at those that no code read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.checkpoints.rules import FLAG, MAX_LAYERS, TEXT, TEXTS, Kind, Number, Rule, Whole, printable

logger = logging.getLogger("quire.checkpoints")

HONOURED, IDLE = "honoured", "without effect"


class Key(NamedTuple):
    """A key. `effect`: HONOURED by the architectures that have the key, and refused in others' files unless the value
    is one of `neutral`; or IDLE. `note` is for the documentation.
    """

    rule: Rule
    effect: str = HONOURED
    note: str = ""
    neutral: tuple = (0,)


class Flags(NamedTuple):
    """A list with a boolean for each layer."""

    def fits(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) <= MAX_LAYERS and all(entry in (0, 1) for entry in value)

    def __str__(self) -> str:
        return "a list of flags"


class Pattern(NamedTuple):
    """A period, or a list with a boolean for each layer: its attention has a window."""

    def fits(self, value: Any) -> bool:
        return Flags().fits(value) or Whole(0, MAX_LAYERS).fits(value)

    def __str__(self) -> str:
        return f"a period from 0 to {MAX_LAYERS}, or a list of flags"


_SIZE, _COUNT, _LAYERS = Whole(1, 1 << 20), Whole(0, 1 << 16), Whole(0, MAX_LAYERS)
_HEADS, _WIDTH = Whole(0, 1 << 14, per_layer=True), Whole(0, 1 << 24, per_layer=True)
_HEAD_DIM, _POSITIONS = Whole(1, 1 << 14), Whole(0, (1 << 32) - 1)
_EPSILON, _FACTOR, _THETA = Number(0, 1), Number(-1e9, 1e9), Number(1e-3, 1e15)
_NUMBERS = Kind("a list of numbers", (list,), (int, float))
_ANY = Kind("a number, a text or a list", (bool, int, float, str, list))
_ID = Whole(0, (1 << 32) - 1)

# keys that begin with the name of the architecture
ARCHITECTURE: dict[str, Key] = {
    "vocab_size": Key(Whole(0, 1 << 24), IDLE, "the rows of the embedding count"),
    "context_length": Key(Whole(1, (1 << 31) - 1)),
    "embedding_length": Key(_SIZE),
    "embedding_length_out": Key(_SIZE, IDLE, "the tensors' shapes count"),
    "embedding_length_per_layer_input": Key(Whole(0, 1 << 20)),
    "block_count": Key(Whole(1, MAX_LAYERS)),
    "feed_forward_length": Key(_WIDTH),
    "leading_dense_block_count": Key(_LAYERS),
    "expert_feed_forward_length": Key(_WIDTH),
    "expert_shared_feed_forward_length": Key(Whole(0, 1 << 24)),
    "expert_chunk_feed_forward_length": Key(Whole(0, 1 << 24)),
    "expert_count": Key(_COUNT),
    "expert_used_count": Key(Whole(0, 1 << 16, per_layer=True)),
    "expert_shared_count": Key(_COUNT),
    "expert_group_count": Key(_COUNT, neutral=(0, 1)),
    "expert_group_used_count": Key(_COUNT, neutral=(0, 1)),
    "expert_weights_scale": Key(_FACTOR, neutral=(0, 1)),
    "expert_weights_norm": Key(FLAG, note="must be what the architecture does where it has no choice"),
    "expert_gating_func": Key(Whole(0, 8), note="must be what the architecture does where it has no choice"),
    "expert_group_scale": Key(_FACTOR),
    "experts_per_group": Key(_COUNT),
    "moe_every_n_layers": Key(_LAYERS),
    "moe_latent_size": Key(_COUNT),
    "interleave_moe_layer_step": Key(_LAYERS, neutral=(0, 1)),
    "swiglu_clamp_exp": Key(_ANY),
    "swiglu_clamp_shexp": Key(_ANY),
    "nextn_predict_layers": Key(_LAYERS, note="the i-th layer that drafts tokens drafts the i-th one"),
    "n_deepstack_layers": Key(_LAYERS, IDLE, "of an encoder of images, which GGUF files are served without"),
    "deepstack_mapping": Key(_ANY, IDLE, "of an encoder of images, which GGUF files are served without"),
    "use_parallel_residual": Key(FLAG),
    "tensor_data_layout": Key(TEXT, IDLE, "of files before GGUF"),
    "hidden_activation": Key(TEXT),
    "pooling_type": Key(Whole(0, 8)),
    "logit_scale": Key(_FACTOR, neutral=(0, 1)),
    "residual_scale": Key(_FACTOR, neutral=(0, 1)),
    "embedding_scale": Key(_FACTOR, neutral=(0, 1)),
    "attn_logit_softcapping": Key(_FACTOR),
    "final_logit_softcapping": Key(_FACTOR),
    "router_logit_softcapping": Key(_FACTOR),
    "classifier.output_labels": Key(TEXTS),
    "classifier.pooling_type": Key(Whole(0, 8)),
    "dense_2_feat_in": Key(_SIZE, IDLE, "the tensor's own shape counts"),
    "dense_2_feat_out": Key(_SIZE, IDLE, "the tensor's own shape counts"),
    "dense_3_feat_in": Key(_SIZE, IDLE, "the tensor's own shape counts"),
    "dense_3_feat_out": Key(_SIZE, IDLE, "the tensor's own shape counts"),
    "full_attention_interval": Key(Whole(1, MAX_LAYERS)),
    "shortconv.l_cache": Key(Whole(2, 64), note="LFM2"),
    "ssm.conv_kernel": Key(Whole(2, 64)),
    "ssm.state_size": Key(_SIZE),
    "ssm.group_count": Key(Whole(0, 1 << 16), note="0 in files of PLaMo 2"),
    "ssm.time_step_rank": Key(_SIZE),
    "ssm.inner_size": Key(_SIZE),
    "ssm.dt_b_c_rms": Key(FLAG),
    "kda.head_dim": Key(_HEAD_DIM, note="Kimi-Linear, Ling 3, GLM-5-next"),
    "kda.safe_gate": Key(FLAG, note="Ling 3"),
    "kda.gate_lower_bound": Key(_FACTOR, note="Ling 3, GLM-5-next"),
    "activation_sparsity_scale": Key(_NUMBERS, note="Gemma 3n"),
    "altup.num_inputs": Key(Whole(1, 64), note="Gemma 3n"),
    "altup.active_idx": Key(Whole(0, 63), note="Gemma 3n"),
    "attention.head_count": Key(_HEADS),
    "attention.head_count_kv": Key(_HEADS),
    "attention.max_alibi_bias": Key(_FACTOR),
    "attention.clamp_kqv": Key(_FACTOR),
    "attention.key_length": Key(_HEAD_DIM),
    "attention.value_length": Key(_HEAD_DIM, note="must be the key's length, except in latent attention and MiMo V2"),
    "attention.layer_norm_epsilon": Key(_EPSILON),
    "attention.layer_norm_rms_epsilon": Key(_EPSILON),
    "attention.group_norm_epsilon": Key(_EPSILON),
    "attention.group_norm_groups": Key(_COUNT),
    "attention.causal": Key(FLAG, note="must be what the architecture does"),
    "attention.q_lora_rank": Key(Whole(0, 1 << 20)),
    "attention.kv_lora_rank": Key(_SIZE),
    "attention.kv_lora_rank_swa": Key(_SIZE, note="dots3"),
    "attention.relative_buckets_count": Key(_COUNT),
    "attention.sliding_window": Key(_POSITIONS, note="without effect in architectures without windows"),
    "attention.sliding_window_pattern": Key(Pattern(), note="a period, or a list of flags per layer"),
    "attention.scale": Key(_FACTOR),
    "attention.output_scale": Key(_FACTOR, neutral=(0, 1)),
    "attention.value_scale": Key(_FACTOR, neutral=(1,)),
    "attention.temperature_length": Key(_COUNT),
    "attention.temperature_scale": Key(_FACTOR),
    "attention.key_length_mla": Key(_HEAD_DIM),
    "attention.value_length_mla": Key(_HEAD_DIM),
    "attention.key_length_mla_swa": Key(_HEAD_DIM, note="dots3"),
    "attention.value_length_mla_swa": Key(_HEAD_DIM, note="dots3"),
    "attention.key_length_swa": Key(_HEAD_DIM),
    "attention.value_length_swa": Key(_HEAD_DIM, note="must be the key's length"),
    "attention.indexer.head_count": Key(_COUNT),
    "attention.indexer.key_length": Key(_COUNT),
    "attention.indexer.top_k": Key(_POSITIONS),
    "attention.indexer.kpool": Key(_COUNT),
    "attention.indexer.kpool_select_tail": Key(FLAG, note="must be true"),
    "attention.indexer.types": Key(Flags(), note="which layers choose keys by themselves"),
    "hyper_connection.count": Key(Whole(1, 64), note="GLM-5-next, HY-V4"),
    "hyper_connection.sinkhorn_iterations": Key(_COUNT, note="GLM-5-next"),
    "hyper_connection.epsilon": Key(_EPSILON, note="GLM-5-next, HY-V4"),
    "hyper_connection.magnitude": Key(_FACTOR, note="HY-V4"),
    "attention.shared_kv_layers": Key(_LAYERS),
    "attention.rope_pattern": Key(_ANY),
    "attention.recurrent_layers": Key(Flags(), note="Qwen3-Next, Qwen3.5; before full_attention_interval"),
    "rope.dimension_count": Key(Whole(0, 1 << 14), note="0 in files of GLM-5-next"),
    "rope.dimension_count_swa": Key(_HEAD_DIM, note="must be the head's length, except in Laguna"),
    "rope.dimension_sections": Key(_ANY, IDLE, "the parts of a position are the same for text"),
    "rope.freq_base": Key(_THETA),
    "rope.freq_base_swa": Key(_THETA),
    "rope.scale_linear": Key(_FACTOR, note="the older name of rope.scaling.factor", neutral=(0, 1)),
    "rope.scaling.type": Key(
        TEXT,
        note="none, linear, yarn; the tensors rope_freqs and rope_factors_* count first",
        neutral=("none", "linear"),
    ),
    "rope.scaling.factor": Key(_FACTOR, neutral=(0, 1)),
    "rope.scaling.alpha": Key(_FACTOR),
    "rope.scaling.attn_factor": Key(_FACTOR, neutral=(0, 1)),
    "rope.scaling.original_context_length": Key(_POSITIONS),
    "rope.scaling.finetuned": Key(FLAG, IDLE, "refused if false in Granite files, whose layers do not rotate then"),
    "rope.scaling.yarn_log_multiplier": Key(_FACTOR),
    "rope.scaling.yarn_ext_factor": Key(_FACTOR, neutral=(-1, 1)),
    "rope.scaling.yarn_attn_factor": Key(_FACTOR, neutral=(0, 1)),
    "rope.scaling.yarn_beta_fast": Key(_FACTOR, neutral=(0, 32)),
    "rope.scaling.yarn_beta_slow": Key(_FACTOR, neutral=(0, 1)),
}
_TOKEN_IDS = {
    f"tokenizer.ggml.{name}_token_id": Key(_ID)
    for name in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask")
} | {
    f"tokenizer.ggml.{name}_token_id": Key(_ID, IDLE, "infill knows the tokens by their names")
    for name in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle")
}
# the others
GENERAL: dict[str, Key] = {
    "general.architecture": Key(TEXT),
    "general.type": Key(TEXT, note="adapters, encoders of images and importance matrices are refused"),
    "general.alignment": Key(Whole(1, 1 << 30)),
    "general.file_type": Key(_ANY, IDLE, "each tensor has its type"),
    "general.quantization_version": Key(_ANY, IDLE),
    "general.name": Key(_ANY, IDLE),
    "general.sampling.temp": Key(Number(0, 100)),
    "general.sampling.top_k": Key(Whole(-(1 << 31), (1 << 31) - 1)),
    "general.sampling.top_p": Key(Number(0, 1)),
    "general.sampling.min_p": Key(Number(0, 1)),
    "general.sampling.penalty_repeat": Key(Number(1e-3, 100)),
    "general.sampling.penalty_last_n": Key(_ANY, IDLE, "the repetition penalty counts all tokens"),
    "general.sampling.sequence": Key(_ANY, IDLE, "temperature, then top-k, top-p and min-p"),
    "general.sampling.xtc_probability": Key(Number(0, 1), IDLE, "reported in the log if it is not 0"),
    "general.sampling.xtc_threshold": Key(Number(0, 1), IDLE),
    "general.sampling.mirostat": Key(Whole(0, 2), IDLE, "reported in the log if it is not 0"),
    "general.sampling.mirostat_tau": Key(_FACTOR, IDLE),
    "general.sampling.mirostat_eta": Key(_FACTOR, IDLE),
    "split.no": Key(_COUNT, IDLE, "names of files count"),
    "split.count": Key(_COUNT, IDLE, "names of files count"),
    "split.tensors.count": Key(_ANY, IDLE, "names of files count"),
    "tokenizer.ggml.model": Key(TEXT),
    "tokenizer.ggml.pre": Key(TEXT),
    "tokenizer.ggml.tokens": Key(TEXTS),
    "tokenizer.ggml.token_type": Key(Kind("a list of whole numbers", (list,), (int,))),
    "tokenizer.ggml.token_type_count": Key(Whole(0, 1 << 20)),
    "tokenizer.ggml.scores": Key(_NUMBERS),
    "tokenizer.ggml.merges": Key(TEXTS),
    "tokenizer.ggml.add_bos_token": Key(FLAG),
    "tokenizer.ggml.add_eos_token": Key(FLAG),
    "tokenizer.ggml.add_sep_token": Key(FLAG),
    "tokenizer.ggml.add_space_prefix": Key(FLAG),
    "tokenizer.ggml.remove_extra_whitespaces": Key(FLAG),
    "tokenizer.ggml.precompiled_charsmap": Key(Kind("a list of bytes", (list,), (int,))),
    "tokenizer.ggml.normalizer.lowercase": Key(FLAG),
    "tokenizer.ggml.normalizer.strip_accents": Key(FLAG),
    "tokenizer.ggml.suppress_tokens": Key(Kind("a list of token ids", (list,), (int,))),
    "tokenizer.chat_template": Key(TEXT),
    "tokenizer.huggingface.json": Key(_ANY, IDLE, "the tokenizer is made of the tokens, as in llama.cpp"),
    "tokenizer.rwkv.world": Key(_ANY, IDLE),
} | _TOKEN_IDS
_TOKEN_LISTS = ("scores", "token_type")
_SPECIAL = (2, 3)  # tokenizer.ggml.token_type: unknown, control
# by tokenizer.ggml.model: ids of special tokens that files may leave out
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
}

# fixed behaviour of architectures that do not read a key, by key; others follow the file
_SOFTMAX, _SIGMOID, _CHOSEN_SOFTMAX = 1, 2, 3
FIXED: dict[str, dict[str, Any]] = {
    "expert_gating_func": dict.fromkeys(
        ("llama", "qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "deepseek", "deepseek2-ocr", "granitemoe",
         "hunyuan-moe", "ernie4_5-moe"), _SOFTMAX)
    | dict.fromkeys(("glm4moe", "exaone-moe", "minimax-m2", "llama4", "glm-dsa", "deepseek32", "hy_v3",
         "dots3note", "hy_v4", "laguna"), _SIGMOID)
    | {"afmoe": _SIGMOID, "dots1": _SIGMOID, "mellum": _SOFTMAX, "mimo2": _SIGMOID, "step35": _SIGMOID}
    | {"qwen35moe": _SOFTMAX, "qwen3next": _SOFTMAX, "jamba": _SOFTMAX, "nemotron_h_moe": _SIGMOID}
    | {"kimi-linear": _SIGMOID, "bailingmoe3": _SIGMOID, "granitehybrid": _CHOSEN_SOFTMAX}
    | {"gpt-oss": _CHOSEN_SOFTMAX},
    "expert_weights_norm": dict.fromkeys(
        ("llama", "qwen3moe", "qwen3vlmoe", "hunyuan-moe", "ernie4_5-moe", "minimax-m2", "hy_v3", "qwen3next",
         "mellum", "mimo2"), True)
    | dict.fromkeys(("qwen2moe", "olmoe", "deepseek", "deepseek2-ocr", "llama4", "jamba"), False),
}  # fmt: skip
# sizes that tensors must have anyway, which some architectures do not read
_OF_TENSORS = frozenset(
    ("context_length", "embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count",
     "expert_shared_feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
     "rope.dimension_count", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size",
     "ssm.time_step_rank")
)  # fmt: skip
_ENCODERS = ("bert", "modern-bert", "nomic-bert", "gemma-embedding")
_STILL_WITHOUT = ("granite", "granitemoe", "granite_swa")  # files of granitehybrid say so


def check_types(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError naming the file, the key and its valid values, for the first key of another type or size."""
    kind = metadata.get("general.architecture")
    for name, value in metadata.items():
        known = GENERAL.get(name) or (ARCHITECTURE.get(name[len(kind) + 1 :]) if _is_of(name, kind) else None)
        if known is not None and not known.rule.fits(value):
            raise ValueError(f"{path}: {name} must be {known.rule}, not {printable(value)}")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    for name in _TOKEN_LISTS:
        listed = metadata.get(f"tokenizer.ggml.{name}")
        if listed and len(listed) != len(tokens):
            raise ValueError(f"{path}: tokenizer.ggml.{name} has {len(listed)} entries for {len(tokens)} tokens")


def settle_ids(metadata: dict[str, Any], path: Path) -> None:
    """Remove the ids of special tokens that the vocabulary does not have, and add those that llama.cpp assumes where
    the file names none, if they are special tokens: token 11 of GPT-2's vocabulary is a comma.
    """
    count, kinds = len(metadata.get("tokenizer.ggml.tokens") or []), metadata.get("tokenizer.ggml.token_type") or []
    for name in _TOKEN_IDS:
        if count and metadata.get(name, 0) >= count:
            logger.warning(
                "%s: %s %s is not in the vocabulary of %s tokens: ignored", path, name, metadata[name], count
            )
            del metadata[name]
    for name, token_id in _DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model"), {}).items():
        if token_id < len(kinds) and kinds[token_id] in _SPECIAL:
            metadata.setdefault(f"tokenizer.ggml.{name}_token_id", token_id)


def _is_of(name: str, kind: Any) -> bool:
    return isinstance(kind, str) and name.startswith(f"{kind}.")


def refuse_unread(metadata: Mapping[str, Any], read: Collection[str], config: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for a key of the architecture that llama.cpp knows, that is not in `read`, and whose value
    changes results. `config` is the config.json that was made from the other keys.
    """
    kind = metadata["general.architecture"]
    for name in metadata:
        suffix = name[len(kind) + 1 :]
        if not _is_of(name, kind) or name in read:
            continue
        known, value = ARCHITECTURE.get(suffix), metadata[name]
        if known is None or suffix == "attention.sliding_window":
            logger.warning("%s: %s has no effect", path, name)
        elif suffix == "rope.scaling.finetuned":
            if kind in _STILL_WITHOUT and not value:
                raise ValueError(f"{path}: {name} false, layers that do not rotate, is not supported")
        elif known.effect == HONOURED and not _changes_nothing(suffix, value, known, kind, config):
            raise ValueError(f"{path}: {name} {printable(value)} is not supported in files of this architecture")


def _changes_nothing(suffix: str, value: Any, known: Key, kind: str, config: Mapping[str, Any]) -> bool:
    if suffix in _OF_TENSORS:
        return True
    if suffix == "attention.causal":
        return value is (kind not in _ENCODERS)
    if suffix in FIXED:
        return FIXED[suffix].get(kind, value) == value or (suffix == "expert_gating_func" and value == 0)
    if suffix in ("attention.value_length", "attention.value_length_swa", "rope.dimension_count_swa"):
        return bool(config.get("kv_lora_rank")) or value in (_head_dim(config), config.get("global_head_dim"))
    if suffix == "expert_used_count" and not config.get("num_experts"):
        return True  # a count of 0 experts
    if suffix == "rope.freq_base_swa":
        return _is_close(value, config.get("rope_theta", 0.0))
    if suffix == "attention.scale":
        return _is_close(value, (config.get("query_pre_attn_scalar") or _head_dim(config)) ** -0.5)
    if suffix == "attention.sliding_window_pattern" and not config.get("sliding_window"):
        return True
    if suffix == "rope.scaling.original_context_length":
        return (config.get("rope_scaling") or {}).get("rope_type") != "longrope"
    values = value if isinstance(value, list) else [value]
    return all(any(_is_close(entry, neutral) for neutral in known.neutral) for entry in values)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _is_close(value: Any, other: float | str) -> bool:
    if isinstance(value, str) or isinstance(other, str):
        return value == other
    return isinstance(value, int | float) and abs(value - other) <= 1e-5 * max(1.0, abs(other))
