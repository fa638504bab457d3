"""The tokenizer in a GGUF file's metadata as tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` gpt2 is byte-level BPE with merges, split by the patterns that `tokenizer.ggml.pre` names; llama
is SentencePiece: pieces with scores, of which the best pair is merged first, and bytes for what no piece has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
    r"?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN, _KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# tokenizer.ggml.pre -> (patterns, applied one after another; a merge-free lookup of whole words first)
_SPLITS: dict[str, tuple[list[str], bool]] = {
    "llama-bpe": ([_LLAMA3], True),
    "dbrx": ([_LLAMA3], False),
    "glm4": ([_LLAMA3], True),
    "qwen2": ([rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"], False),
    "starcoder": ([r"\p{N}", _GPT2], False),
    "gpt-2": ([_GPT2], False),
    "tekken": ([_TEKKEN], True),
    "gpt-4o": ([_GPT4O], False),
    "deepseek-v3": ([r"\p{N}{1,3}", _KANA, _DEEPSEEK3], False),
    "deepseek-coder": ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"], False),
    "seed-coder": ([_SEED], False),
}
_ALIASES = {
    "default": "gpt-2",
    "gpt2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "exaone4": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "chatglm-bpe": "glm4",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "smollm": "starcoder",
    "refact": "starcoder",
    "command-r": "starcoder",
    "codeshell": "starcoder",
    "exaone": "starcoder",
    "minimax-m2": "gpt-4o",
    "hunyuan-dense": "deepseek-v3",
}
_NORMALIZED = ("qwen2",)  # texts are brought to NFC first


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and its tokenizer_config.json.

    Raises:
        ValueError: the kind of tokenizer is not supported.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
    added = _add_tokens(tokenizer, metadata, tokens)
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False, "added_tokens_decoder": added}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    _add_ends(tokenizer, metadata, tokens, kind)
    return tokenizer, config


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(_SPLITS)}. Name the tokenizer of the "
            "original model with --tokenizer"
        )
    patterns, whole_words = _SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    if name in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocabulary, _merges(vocabulary, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    starts_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    # as llama.cpp does: before the text, and before each stretch after a special token
    prepend = [normalizers.Prepend(_SPACE)] if starts_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if starts_with_space else steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, that with the best score first, as SentencePiece merges."""
    ranked = []
    for piece, token_id in vocabulary.items():
        pairs = [
            (vocabulary[piece[:i]], vocabulary[piece[i:]], piece[:i], piece[i:])
            for i in range(1, len(piece))
            if piece[:i] in vocabulary and piece[i:] in vocabulary
        ]
        ranked += [(-scores[token_id], *pair) for pair in sorted(pairs)]
    ranked.sort(key=lambda entry: entry[0])
    return [entry[3:] for entry in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, dict[str, Any]]:
    """Add control tokens and those that users defined, with the ids that they have; return their descriptions."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    found = {i: kind for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_tokens(
        [AddedToken(tokens[i], special=kind == _CONTROL, normalized=False) for i, kind in found.items()]
    )
    flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {str(i): {"content": tokens[i], "special": kind == _CONTROL, **flags} for i, kind in found.items()}


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], kind: str) -> None:
    """Put BOS before and EOS after every text, where the metadata asks for it."""
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    before = [tokens[bos]] if begins and bos is not None else []
    after = [tokens[eos]] if ends and eos is not None else []
    if not before and not after:
        return
    special = [(tokens[i], i) for i in {bos, eos} if i is not None]
    single = [*before, "$A", *after]
    pair = [*single, *(f"{part}:1" for part in [*before, "$B", *after])]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
