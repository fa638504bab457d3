"""Writes GGUF files of the small random checkpoints of `checkpoints.py`, quantized with the `gguf` package, as
llama.cpp's converter does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf")

# types that the package can dequantize but not quantize: their blocks are random, with scales of a fitting size
RANDOM_TYPES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def blocks_of(weight: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Return the weight in blocks of a type: uint8 `[rows, bytes]`."""
    quantization = gguf.GGMLQuantizationType[kind]
    if kind not in RANDOM_TYPES:
        return gguf.quants.quantize(weight, quantization)
    values, size = gguf.GGML_QUANT_SIZES[quantization]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // values, size), dtype=np.uint8)
    spread = {"IQ4_NL": 60, "IQ4_XS": 1200, "Q6_K": 1400, "Q3_K": 40, "Q2_K": 14, "Q4_K": 280, "Q5_K": 560}[kind]
    for at in RANDOM_TYPES[kind]:
        scale = rng.uniform(0.5, 1, blocks.shape[:-1]) * (
            0.12 if len(RANDOM_TYPES[kind]) == 1 or at in (0, 80) else 0.06
        )
        blocks[..., at : at + 2] = (scale / spread).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


def write_gguf(
    source: str, path: Path, kinds: dict[str, str], arch: str, tokenizer: str = "gpt2", *, tensors_per_shard: int = 0
) -> dict[str, Any]:
    """Write checkpoint `source` to `path`. `kinds` has the type of each weight by the last part of its GGUF name
    ("attn_q"), and a "default". Returns the weights that the file stands for, by their names in `source`.
    """
    config = json.loads(Path(source, "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_shard)
    _write_settings(writer, config)
    _write_tokenizer(writer, source, tokenizer)
    plain = {}
    for number, (name, tensor) in enumerate(sorted(load_file(Path(source, "model.safetensors")).items())):
        base, _, end = name.rpartition(".")
        inner = base.removeprefix("model.layers.").partition(".")
        renamed = _TOP.get(base) or f"blk.{inner[0]}.{_NAMES[inner[2]]}"
        weight = tensor.float().numpy()
        kind = "F32" if weight.ndim == 1 else kinds.get(renamed.split(".")[-1], kinds["default"])
        swap = arch == "llama" and renamed.endswith(("attn_q", "attn_k"))
        heads = config["num_attention_heads" if renamed.endswith("attn_q") else "num_key_value_heads"]
        if swap:
            weight = swapped(weight, heads)
        if kind in ("F32", "F16"):
            stored = weight.astype(np.float16 if kind == "F16" else np.float32)
            value = stored.astype(np.float32)
            writer.add_tensor(f"{renamed}.{end}", stored)
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            stored = blocks_of(weight, kind, number)
            value = gguf.quants.dequantize(stored, quantization)
            writer.add_tensor(f"{renamed}.{end}", stored, raw_dtype=quantization)
        value = value.reshape(weight.shape)
        plain[name] = torch.from_numpy(unswapped(value, heads) if swap else value.copy()).contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def swapped(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in the order of llama.cpp's converter."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def unswapped(weight: np.ndarray, heads: int) -> np.ndarray:
    shape = (heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape).copy()


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    if rope.get("rope_type") == "llama3":
        dim = config["hidden_size"] // heads
        frequencies = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        writer.add_tensor("rope_freqs.weight", _llama3_factors(frequencies, rope))


def _llama3_factors(frequencies: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    original, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter, source: str, kind: str) -> None:
    tokenizer = json.loads(Path(source, "tokenizer.json").read_text())
    settings = json.loads(Path(source, "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocabulary, **{text: token["id"] for text, token in added.items()}}.items(), key=lambda t: t[1])
    texts = [text for text, _ in tokens]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(texts)
    bytes_of = gguf.TokenType.BYTE
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if text in added else bytes_of if text.startswith("<0x") else gguf.TokenType.NORMAL
            for text in texts
        ]
    )
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    if kind == "gpt2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(merges)
    else:  # earlier merges have better scores
        rank = {merge.replace(" ", ""): -float(i) for i, merge in enumerate(merges)}
        writer.add_token_scores([rank.get(text, -1e6) for text in texts])
    ids = {text: i for i, text in enumerate(texts)}
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(name):
            add(ids[settings[name]])
    writer.add_add_bos_token(bool(settings.get("bos_token")))
    template = Path(source, "chat_template.jinja")
    writer.add_chat_template(template.read_text() if template.is_file() else settings["chat_template"])
