"""Builds tiny Whisper checkpoints, with random weights and Whisper's special tokens, and sounds for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken

from tests.helpers.models.checkpoints import _byte_level

LANGUAGES = ("en", "de", "fr")
SIZES: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "max_target_positions": 448,
}
RATE = 16_000


def build_whisper(folder: Path, positions: int = 1500, *, multilingual: bool = True, **sizes: Any) -> Any:
    """Write a checkpoint that hears `positions` times 20 ms, and return transformers' model."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    tokenizer = _byte_level()
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = ["endofspeech", "startoftranscript", *(LANGUAGES if multilingual else ()), *tasks]
    names += [f"{i * 0.02:.2f}" for i in range(1501)]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in names}
    end = ids["endofspeech"]  # the tiny tokenizer has another <|endoftext|>, below the words
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_source_positions=positions,
        decoder_start_token_id=ids["startoftranscript"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SIZES | sizes,
    )
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():  # also biases and norms, which are 0 and 1 in a new model
        if "embed_positions" not in name or "decoder" in name:
            parameter.data += torch.randn_like(parameter) / (4 if "embed_tokens" in name else 6)
        if "encoder_attn" in name and "proj" in name:
            parameter.data *= 3  # so that the audio decides what is written
    with torch.no_grad():  # as a trained model, it writes words
        model.proj_out.weight[:end] *= 1.4
        model.proj_out.weight[end:] *= 0.65
    model.generation_config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=ids["startoftranscript"],
        no_timestamps_token_id=ids["notimestamps"],
        prev_sot_token_id=ids["startofprev"],
        suppress_tokens=[5, 7, 11, *(ids[name] for name in ("startoftranscript", *tasks))],
        begin_suppress_tokens=[9, end],
        max_initial_timestamp_index=50,
        max_length=config.max_target_positions,
        is_multilingual=multilingual,
        return_timestamps=False,
        alignment_heads=[[0, 1], [1, 3], [1, 0]],
        **(
            {
                "lang_to_id": {f"<|{name}|>": ids[name] for name in LANGUAGES},
                "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
            }
            if multilingual
            else {}
        ),
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endofspeech|>"}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config.num_mel_bins})
    )
    return model


def token_id(model: Any, name: str) -> int:
    """Return the id of a special token, e.g. "en" or "notimestamps"."""
    settings = model.generation_config
    known = {
        "startoftranscript": settings.decoder_start_token_id,
        "endofspeech": settings.eos_token_id,
        "notimestamps": settings.no_timestamps_token_id,
        "nospeech": settings.no_timestamps_token_id - 1,
        "startofprev": settings.prev_sot_token_id,
    }
    if name in known:
        return known[name]
    return settings.task_to_id.get(name) or settings.lang_to_id[f"<|{name}|>"]


def sound(seed: int, seconds: float = 1.0) -> np.ndarray:
    """Return a few tones and noise, float32 in -1 .. 1 at 16 kHz."""
    rng, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in rng.uniform(100, 4000, 4))
    return (0.15 * tones + 0.02 * rng.standard_normal(len(time))).astype(np.float32)


def build_qwen3_asr(folder: Path, *, tied: bool = True) -> Any:
    """Write a checkpoint of Qwen3-ASR, and return transformers' model."""
    from transformers import GenerationConfig, Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    tokenizer = _byte_level()
    names = [f"<|{name}|>" for name in ("im_start", "im_end", "audio_start", "audio_pad", "audio_end")] + ["<asr_text>"]
    tokenizer.add_special_tokens([AddedToken(name, special=name != "<asr_text>") for name in names])
    ids = {name: tokenizer.token_to_id(name) for name in [*names, "<|endoftext|>"]}
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    audio = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "num_mel_bins": 32,
        "downsample_hidden_size": 16,
        "n_window_infer": 200,
        "output_dim": 64,
    }
    config = Qwen3ASRConfig(
        text_config={"model_type": "qwen3", **text},
        audio_config={"model_type": "qwen3_asr_encoder", **audio},
        audio_token_id=ids["<|audio_pad|>"],
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|im_end|>"]],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(4)
    model = Qwen3ASRForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 6
    with torch.no_grad():  # as a trained model, it hears what decides the text, and writes no placeholders
        for name in ("linear_1", "linear_2"):
            getattr(model.model.multi_modal_projector, name).weight *= 2
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return model
