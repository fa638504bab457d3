"""The tokenizers of GGUF files that have pieces of text in place of bytes, by `tokenizer.ggml.model`:

- llama: SentencePiece BPE: the pair with the best score is merged first, and characters without a piece are bytes.
- gemma4: BPE with merges, without words.
- t5: SentencePiece unigram: the pieces with the best sum of scores.
- plamo2: pieces with the best sum of scores, by rules of their own (`server/text/plamo.py`).
- bert: WordPiece: the longest piece first. Pieces that begin a word have a U+2581 in front, which "##" replaces here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

PLAMO = "plamo2"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_BYTE = 6
_NORMAL = 1
_SPACE = "\u2581"


def sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _with_bytes(vocabulary, merges_by_score(vocabulary, scores), tokens, metadata)
    starts_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    # as llama.cpp does: before the text, and before each stretch after a special token
    prepend = [normalizers.Prepend(_SPACE)] if starts_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if starts_with_space else steps)
    return tokenizer


def gemma_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _with_bytes(vocabulary, read_merges(metadata), tokens, metadata)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def plamo_lines(metadata: Mapping[str, Any], tokens: list[str]) -> str:
    """Return the lines of tokenizer.jsonl."""
    names = {UNKNOWN: "UNKNOWN", CONTROL: "CONTROL", _BYTE: "BYTE"}
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    entries = zip(tokens, _scores(metadata, tokens), (names.get(kind, "NORMAL") for kind in kinds))
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def _scores(metadata: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return the pieces' scores, which are 0 without an entry."""
    return metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)


def unigram(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, _scores(metadata, tokens))), unknown, byte_fallback=False))
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        tokenizer.normalizer = normalizers.Precompiled(bytes(entry & 255 for entry in charsmap))
    prefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=prefix)
    merges_spaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)
    words = [pre_tokenizers.WhitespaceSplit()] if merges_spaces else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, spaces])
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=prefix)
    return tokenizer


def wordpiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    pieces = [token if kind in (CONTROL, UNKNOWN) else _wordpiece(token) for token, kind in zip(tokens, types)]
    lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase")
    if lowercase is None:  # by the vocabulary, which has no capitals if texts are to have none
        ordinary = (piece for piece, kind in zip(pieces, types) if kind == _NORMAL and not piece.startswith("["))
        lowercase = not any("A" <= character <= "Z" for piece in ordinary for character in piece)
    strips = metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
    unknown = pieces[metadata.get("tokenizer.ggml.unknown_token_id", 100)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, continuing_subword_prefix="##"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _wordpiece(token: str) -> str:
    return token[1:] if token.startswith(_SPACE) else f"##{token}"


def _with_bytes(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], tokens: list[str], metadata: Mapping[str, Any]
) -> Tokenizer:
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    return Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs, each of which may begin with a space."""
    merges = metadata.get("tokenizer.ggml.merges", [])
    return [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]


def merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, that with the best score first, as SentencePiece merges."""
    find, ranked = vocabulary.get, []
    for piece, token_id in vocabulary.items():
        pairs = []
        for i in range(1, len(piece)):
            if (left := find(piece[:i])) is not None and (right := find(piece[i:])) is not None:
                pairs.append((left, right, i))
        pairs.sort()
        ranked += [(-scores[token_id], piece, i) for _, _, i in pairs]
    ranked.sort(key=itemgetter(0))
    return [(piece[:i], piece[i:]) for _, piece, i in ranked]
