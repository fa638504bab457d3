"""Tokenizers in the metadata of GGUF files, as llama.cpp's converter writes it, give the tokens of those they were made
of.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import tiktoken
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.checkpoints.gguf.splits import ALIASES, SPLITS
from quire.checkpoints.gguf.tokenizer import gguf_tokenizer, tokenizer_files
from tests.helpers.models.checkpoints import TEXT

TEXTS = [
    "It's 12345 \r\n\n  Ä中文かな{x}_y\t!?🙂 don'T",
    "  two  spaces\n\n\n and\ttabs ",
    "ＦＵＬＬ Width, CamelCaseWords and 1,234,567.89 numbers; naïve café",
    "다음 한국어 текст и العربية हिन्दी ไทย",
    "",
    " ",
    "a" * 150,
    "the [MASK] of <s> the </s> engine <mask> reads",
    TEXT,
]
CLS, SEP, MASK, UNKNOWN, PAD = "[CLS]", "[SEP]", "[MASK]", "[UNK]", "[PAD]"
NORMAL, UNKNOWN_TYPE, CONTROL = 1, 2, 3


def check(ours: Tokenizer, theirs: Tokenizer, *, pairs: bool = False) -> None:
    for text in TEXTS:
        found, expected = ours.encode(text), theirs.encode(text)
        assert found.ids == expected.ids, text
        assert ours.decode(found.ids) == theirs.decode(expected.ids)
        if pairs:
            found, expected = (tokenizer.encode(text, "a second text") for tokenizer in (ours, theirs))
            assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]


def types_of(tokenizer: Tokenizer) -> list[int]:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return [CONTROL if token in special else NORMAL for token in tokens_of(tokenizer)]


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece(lowercase):
    theirs = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.decoder = decoders.WordPiece()
    special = [PAD, UNKNOWN, CLS, SEP, MASK]
    theirs.train_from_iterator([TEXT, *TEXTS[:2]], trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    ids = {token: theirs.token_to_id(token) for token in special}
    theirs.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, ids[CLS]), (SEP, ids[SEP])],
    )
    phantom = [
        token if token in special else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in tokens_of(theirs)
    ]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": phantom,
        "tokenizer.ggml.token_type": types_of(theirs),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.bos_token_id": ids[CLS],
        "tokenizer.ggml.eos_token_id": ids[SEP],
        "tokenizer.ggml.seperator_token_id": ids[SEP],
        "tokenizer.ggml.mask_token_id": ids[MASK],
        "tokenizer.ggml.unknown_token_id": ids[UNKNOWN],
    }
    ours, config = gguf_tokenizer(metadata)
    check(ours, theirs, pairs=True)
    assert config["sep_token"] == SEP and config["mask_token"] == MASK and config["unk_token"] == UNKNOWN
    assert "token_type_ids" in config["model_input_names"]


def _charsmap() -> bytes:
    """SentencePiece's map of characters (a double array, then texts) of one entry: a full-width A becomes A."""
    units = [0] * 1024
    units[0] = 0x100 << 10
    position = 0x100
    for byte, following in zip("Ａ".encode(), (0x200, 0x300, 0x3A2)):
        position ^= byte
        units[position] = (position ^ following) << 10 | byte
        last, position = position, following
    units[last] |= 1 << 8  # an entry ends here
    units[position] = 1 << 31  # at the first text
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + b"A\0"


@pytest.mark.parametrize("mapped", [True, False])
def test_unigram(mapped):
    """The tokenizer of XLM-RoBERTa."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    theirs = Tokenizer(models.Unigram())
    if mapped:
        theirs.normalizer = normalizers.Precompiled(_charsmap())
    space = pre_tokenizers.Metaspace(prepend_scheme="always")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    theirs.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>")
    theirs.train_from_iterator([TEXT, *TEXTS[:2], "A B C"], trainer)
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    spec = json.loads(theirs.to_str())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in spec["model"]["vocab"]],
        "tokenizer.ggml.scores": [score for _, score in spec["model"]["vocab"]],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [UNKNOWN_TYPE, CONTROL] + [NORMAL] * (len(tokens_of(theirs)) - 5),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": spec["model"]["unk_id"],
    }
    if mapped:  # written as signed bytes
        metadata["tokenizer.ggml.precompiled_charsmap"] = list(struct.unpack("4102b", _charsmap()))
        assert "A" in "".join(theirs.encode("Ａ").tokens)
    check(gguf_tokenizer(metadata)[0], theirs, pairs=True)


@pytest.mark.parametrize("kind", ["t5", "plamo2"])
def test_pieces_without_scores(kind):
    """As in llama.cpp the scores are 0 then."""
    tokens = ["a", "b", "<unk>", "ab"]
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens}
    named = metadata | {"tokenizer.ggml.scores": [0.0] * 4}
    assert tokenizer_files(metadata) == tokenizer_files(named)


def test_gemma4():
    """BPE of whole texts, with bytes for what no piece has."""
    special, bytes_ = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{i:02X}>" for i in range(256)]
    theirs = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "\u2581")
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[^\n]{1,12}"), "isolated")  # for shorter merges
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special + bytes_ + ["\n\n"], show_progress=False)
    theirs.train_from_iterator([TEXT, TEXTS[0], TEXTS[1]], trainer)
    spec = json.loads(theirs.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    spec["model"]["merges"].insert(0, ["\n", "\n"])
    theirs = Tokenizer.from_str(json.dumps(spec))
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    theirs.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens_of(theirs),
        "tokenizer.ggml.token_type": types_of(theirs),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    check(gguf_tokenizer(metadata)[0], theirs)


def _letters() -> dict[int, str]:
    """The characters that stand for bytes in byte-level tokenizers."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


@pytest.mark.parametrize("has_merges", [True, False])
def test_kimi_k2(has_merges):
    """Kimi's own tokenizer is tiktoken's."""
    words = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    endings = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rest = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    pattern = "|".join([r"[\p{Han}]+", words % ("*", "+") + endings, words % ("+", "*") + endings, *rest])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=list(_letters().values()), show_progress=False)
    trained.train_from_iterator([TEXT, *TEXTS[:4]], trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    letters = _letters()
    tokens = list(dict.fromkeys([*(letters[i] for i in range(256)), *("".join(merge) for merge in merges)]))
    byte_of = {letter: byte for byte, letter in letters.items()}
    ranks = {bytes(byte_of[letter] for letter in token): rank for rank, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"[EOS]": len(ranks)})
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": [*tokens, "[EOS]"],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL],
    }
    if has_merges:
        metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    ours, _ = gguf_tokenizer(metadata)
    for text in [*TEXTS, "中文[EOS]ABC中文a漢字XyzだHan 12中 'LL you'LL"]:
        assert ours.encode(text).ids == theirs.encode(text, allowed_special="all"), text


@pytest.mark.parametrize("pre", [*SPLITS, *ALIASES])
def test_kinds_of_byte_level_tokenizers(pre):
    """Each splits every text without loss; numbers as the kind's patterns say."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": alphabet, "tokenizer.ggml.pre": pre}
    tokenizer, _ = gguf_tokenizer(metadata)
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == normalize(text)
    words = [TEXTS[0][slice(*span)] for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(TEXTS[0])]
    digits = {len(word.strip()) for word in words if word.strip().isdigit()}
    threes = "afmoe dbrx deepseek-v3 default falcon glm4 gpt-4o granite-embed-multi-97m jais-2 kimi-k2 llama-bpe"
    group = dict.fromkeys([*threes.split(), "minicpm5", "tiny_aya"], 3) | {"gpt-2": 5, "bloom": 5, "superbpe": 3}
    assert max(digits) == group.get(ALIASES.get(pre, pre), 1)
    assert bool({"12", "345"} & set(words)) == (ALIASES.get(pre, pre) in ("afmoe", "superbpe", "tiny_aya"))


def test_texts_of_some_kinds_begin_with_bos():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*alphabet, "<bos>"],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL],
        "tokenizer.ggml.bos_token_id": 256,
    }
    for pre, count in (("llama-bpe", 2), ("tekken", 2), ("qwen2", 1)):
        tokenizer, _ = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": pre})
        assert len(tokenizer.encode("a").ids) == count
        tokenizer, _ = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
        assert len(tokenizer.encode("a").ids) == 1


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", None])
def test_other_kinds_are_refused(kind):
    with pytest.raises(ValueError, match="is not supported; supported: gpt2, llama, gemma4, t5, bert"):
        gguf_tokenizer({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]})
