"""The tokenizer in a GGUF file's metadata as tokenizer.json (PLaMo: tokenizer.jsonl) and tokenizer_config.json.

`tokenizer.ggml.model` gpt2 is byte-level BPE with merges, split by the patterns that `tokenizer.ggml.pre` names
(`splits.py`); the others are in `pieces.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.checkpoints.gguf.pieces import (
    CONTROL,
    PLAMO,
    UNKNOWN,
    USER_DEFINED,
    gemma_bpe,
    merges_by_score,
    plamo_lines,
    read_merges,
    sentencepiece_bpe,
    unigram,
    wordpiece,
)
from quire.checkpoints.gguf.splits import find_split

_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MORE_IDS = {"sep_token": "seperator", "mask_token": "mask", "cls_token": "cls"}  # llama.cpp's spelling


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of the tokenizer, by name.

    Raises:
        ValueError: the kind of tokenizer is not supported.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind == PLAMO and tokens:
        config = _config(metadata, tokens) | {"tokenizer_class": "Plamo2Tokenizer"}
        config |= {name: metadata.get(f"tokenizer.ggml.{name}", False) for name in ("add_bos_token", "add_eos_token")}
        return {"tokenizer.jsonl": plamo_lines(metadata, tokens), "tokenizer_config.json": _json(config)}
    tokenizer, config = gguf_tokenizer(metadata)
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": _json(config)}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, of another kind than PLaMo's, and its tokenizer_config.json. Raises as `tokenizer_files`
    does.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in _MODELS or not tokens:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join((*_MODELS, PLAMO))}")
    tokenizer = _MODELS[kind](metadata, tokens)
    config = {"added_tokens_decoder": _add_tokens(tokenizer, metadata, tokens)} | _config(metadata, tokens)
    _add_ends(tokenizer, metadata, tokens, kind)
    return tokenizer, config


def _config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for name, key in (_IDS | _MORE_IDS).items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    if metadata.get("tokenizer.ggml.token_type_count", 1) > 1:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    split = find_split(metadata.get("tokenizer.ggml.pre", "default"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = read_merges(metadata)
    if "tokenizer.ggml.merges" not in metadata:  # for tiktoken, whose ids are the ranks
        merges = merges_by_score(vocabulary, [-float(i) for i in range(len(tokens))])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_MODELS = {
    "gpt2": _byte_level,
    "llama": sentencepiece_bpe,
    "gemma4": gemma_bpe,
    "t5": unigram,
    "bert": wordpiece,
}


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, dict[str, Any]]:
    """Add special tokens and those that users defined, with their ids. Returns their descriptions."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    special = {i: kind != USER_DEFINED for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    tokenizer.add_tokens([AddedToken(tokens[i], special=hidden, normalized=False) for i, hidden in special.items()])
    flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {str(i): {"content": tokens[i], "special": hidden, **flags} for i, hidden in special.items()}


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], kind: str) -> None:
    """Put BOS before and EOS after every text, where the metadata asks for it."""

    def find(*names: str) -> int | None:
        ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
        return next((token_id for token_id in ids if token_id is not None), None)

    bos, eos, encodes = find("bos", "cls"), find("eos", "seperator"), kind == "bert"
    begins = metadata.get("tokenizer.ggml.add_bos_token", _begins(metadata, kind))
    ends = metadata.get("tokenizer.ggml.add_eos_token", encodes or kind == "t5")
    before = [tokens[bos]] if begins and bos is not None else []
    after = [tokens[eos]] if ends and eos is not None else []
    if not before and not after:
        return
    special = [(tokens[i], i) for i in {bos, eos} if i is not None]
    single = [*before, "$A", *after]
    second = [*before, "$B", *after]
    if after:  # an encoder: [CLS] A [SEP] B [SEP], in RoBERTa with a second one between the texts
        separators = after if metadata.get("tokenizer.ggml.add_sep_token", False) and not encodes else []
        second = [*separators, "$B", *after]
    segment = int(metadata.get("tokenizer.ggml.token_type_count", 2 if encodes else 1) > 1 or not after)
    pair = [*single, *(f"{part}:{segment}" for part in second)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _begins(metadata: Mapping[str, Any], kind: str) -> bool:
    """Return whether texts begin with BOS by default, as llama.cpp assumes where the file does not say."""
    if kind != "gpt2":
        return kind != "t5"
    return find_split(metadata.get("tokenizer.ggml.pre", "default")).begins
