"""The effect of each key of a model's JSON files, for the documentation and for the reports of ignored keys.

config.json is not here: each family has its own keys (`docs/models.md`); types and ranges are in `config_schema.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("quire.checkpoints")

HONOURED, REFUSED, IDLE = "honoured", "refused", "without effect"
REPORTED = "without effect, reported in the log"


class Entry(NamedTuple):
    effect: str
    note: str = ""


_TEMPLATE = Entry(HONOURED, "before those of the tokenizer if the model has a processor, else after them")
_SIZES = Entry(HONOURED, "families that have it")
GENERATION: dict[str, Entry] = (
    dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), Entry(HONOURED, "as default"))
    | {
        "max_new_tokens": Entry(HONOURED, "as default of max_tokens"),
        "eos_token_id": Entry(HONOURED, "beside the tokenizer's"),
        "suppress_tokens": Entry(HONOURED),
        "begin_suppress_tokens": Entry(HONOURED, "models that transcribe audio"),
        "do_sample": Entry(IDLE, "false does not make the default greedy, as in vLLM; temperature 0 does"),
    }
    | dict.fromkeys(
        ("stop_strings", "bad_words_ids", "no_repeat_ngram_size", "min_new_tokens", "top_h", "typical_p",
         "epsilon_cutoff", "eta_cutoff", "sequence_bias", "forced_bos_token_id",
         "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "watermarking_config",
         "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "num_beams", "penalty_alpha", "constraints",
         "force_words_ids"),
        Entry(REPORTED),
    )
    | dict.fromkeys(
        ("max_length", "min_length", "early_stopping", "max_time", "use_cache", "cache_implementation", "cache_config",
         "max_cache_len", "length_penalty", "renormalize_logits", "remove_invalid_values", "token_healing",
         "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
         "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant", "use_mtp",
         "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
         "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
         "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
         "continuous_batching_config", "low_memory", "dola_layers", "diversity_penalty", "num_beam_groups",
         "prefill_chunk_size", "_from_model_config", "transformers_version"),
        Entry(IDLE),
    )
)  # fmt: skip
_PIXELS: dict[str, Entry] = (
    dict.fromkeys(("image_mean", "image_std", "rescale_factor", "do_normalize", "resample"), Entry(HONOURED))
    | {
        "size": Entry(HONOURED, "or refused, where the encoder takes one size only"),
        "crop_size": Entry(HONOURED, "must be the encoder's size"),
        "do_center_crop": _SIZES,
        "do_resize": Entry(REFUSED, "if false"),
        "do_rescale": Entry(REFUSED, "if false"),
        "image_processor_type": Entry(HONOURED, "tells LLaVA's padding"),
    }
    | dict.fromkeys(
        ("patch_size", "merge_size", "min_pixels", "max_pixels", "pooling_kernel_size", "max_soft_tokens",
         "max_image_size", "do_image_splitting", "min_patches", "max_patches", "base_size", "image_size", "tile_size",
         "crop_mode", "crop_to_patches", "do_pan_and_scan"),
        _SIZES,
    )
    | dict.fromkeys(
        ("do_convert_rgb", "default_to_square", "do_pad", "pad_size", "data_format", "input_data_format", "device",
         "return_tensors", "disable_grouping", "processor_class", "temporal_patch_size"),
        Entry(IDLE, ""),
    )
    | {"image_seq_length": Entry(IDLE, "follows from the sizes")}
)  # fmt: skip

_FRAMES = dict.fromkeys(
    ("fps", "num_frames", "min_frames", "max_frames", "initial_shift"), Entry(HONOURED, "which frames are chosen")
) | {
    "temporal_patch_size": Entry(HONOURED, "must be the encoder's"),
    "cap_pixels_per_frame": _SIZES,
    "video_processor_type": Entry(IDLE, "the architecture says it"),
    "do_sample_frames": Entry(IDLE, "frames of a file are chosen, frames of a client are not"),
    "return_metadata": Entry(IDLE),
}

FILES: dict[str, dict[str, Entry]] = {
    "chat_template.json": {"chat_template": _TEMPLATE},
    "processor_config.json": {
        "chat_template": _TEMPLATE,
        "image_processor": Entry(HONOURED, "as preprocessor_config.json, if there is none"),
        "processor_class": Entry(IDLE),
        "video_processor": Entry(HONOURED, "before video_preprocessor_config.json"),
        "feature_extractor": Entry(IDLE, "audio is refused"),
        "audio_tokenizer": Entry(IDLE, "audio is refused"),
        "auto_map": Entry(IDLE, "code of the model's folder is not run"),
        "image_seq_length": Entry(IDLE, "follows from the sizes"),
    },
    "preprocessor_config.json": _PIXELS,
    "video_preprocessor_config.json": _PIXELS | _FRAMES,
    "generation_config.json": GENERATION,
    "modules.json": {
        "idx": Entry(HONOURED),
        "path": Entry(HONOURED),
        "type": Entry(HONOURED, "Transformer, Pooling, Dense, Normalize, LogitScore; others are refused"),
        "name": Entry(IDLE),
        "kwargs": Entry(IDLE, "names of arguments that a call of the library may pass"),
    },
    "sentence_bert_config.json": {
        "max_seq_length": Entry(HONOURED),
        "do_lower_case": Entry(HONOURED),
        "tokenizer_args": Entry(HONOURED, "model_max_length and truncation_side"),
        "processor_kwargs": Entry(HONOURED, "model_max_length and truncation_side"),
        "query_length": Entry(REFUSED),
        "document_length": Entry(REFUSED),
        "query_expansion": Entry(REFUSED),
        "processing_kwargs": Entry(REFUSED, "if it sets anything"),
        "tokenizer_name_or_path": Entry(REFUSED, "set --tokenizer"),
        "model_args": Entry(IDLE, "--dtype and others decide it"),
        "model_kwargs": Entry(IDLE, "--dtype and others decide it"),
        "config_args": Entry(IDLE),
        "config_kwargs": Entry(IDLE),
        "transformer_task": Entry(IDLE, "the architecture in config.json counts"),
        "modality_config": Entry(IDLE, "the architecture in config.json counts"),
        "module_output_name": Entry(IDLE),
        "unpad_inputs": Entry(IDLE, "nothing is padded"),
        "backend": Entry(IDLE),
    },
    "1_Pooling/config.json": {
        "pooling_mode": Entry(HONOURED),
        **dict.fromkeys(
            (f"pooling_mode_{name}" for name in ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens",
                                                "weightedmean_tokens", "lasttoken")),
            Entry(HONOURED, "older name"),
        ),
        "include_prompt": Entry(REFUSED, "if false and there is a default prompt"),
        "embedding_dimension": Entry(IDLE, "the model's size counts"),
        "word_embedding_dimension": Entry(IDLE, "the model's size counts"),
    },
    "2_Dense/config.json": {
        "in_features": Entry(HONOURED),
        "out_features": Entry(HONOURED),
        "bias": Entry(HONOURED),
        "activation_function": Entry(HONOURED, "Identity, Tanh, ReLU, GELU, Sigmoid; others are refused"),
        "use_residual": Entry(REFUSED),
        "module_input_name": Entry(REFUSED, "unless it is sentence_embedding"),
        "module_output_name": Entry(REFUSED, "unless it is sentence_embedding"),
    },
    "config_sentence_transformers.json": {
        "prompts": Entry(HONOURED, "the default one; clients put others before their texts"),
        "default_prompt_name": Entry(HONOURED),
        "truncate_dim": Entry(HONOURED, "the default of dimensions"),
        "activation_fn": Entry(HONOURED, "of a cross-encoder"),
        "similarity_fn_name": Entry(IDLE, "scores are cosines"),
        "keep_in_fp32_modules": Entry(IDLE),
        "model_type": Entry(IDLE),
        "requirements": Entry(IDLE),
        "__version__": Entry(IDLE),
    },
}  # fmt: skip


def report_ignored(values: Mapping[str, Any], path: Path) -> None:
    """Log the keys of a generation_config.json that would change answers elsewhere and have no effect here."""
    idle = [
        key
        for key, value in values.items()
        if GENERATION.get(key, Entry(IDLE)).effect == REPORTED and value not in (None, False, 0, 1, [], {})
    ]
    if idle:
        logger.warning("%s: no effect: %s", path, ", ".join(sorted(idle)))


def refuse(name: str, values: Mapping[str, Any], path: Path, neutral: tuple = (None, False, {}, [])) -> None:
    """Raise ValueError for a key of the file `name` that is REFUSED, unless its value is one of `neutral`."""
    for key, entry in FILES[name].items():
        if entry.effect == REFUSED and values.get(key) not in neutral:
            note = f": {entry.note}" if entry.note else ""
            raise ValueError(f"{path}: {key} {str(values[key])[:80]!r} is not supported{note}")
