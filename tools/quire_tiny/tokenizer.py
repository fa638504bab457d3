"""The tokenizer of quire-tiny: a byte-level BPE vocabulary whose words are whole tokens and whose other text is one
token per letter or byte.

A word that is in the vocabulary is one token; every other word is its letters (`ignore_merges`: a pre-token that is in
the vocabulary is taken whole). The only merges are those of the bytes of one letter or mark in `LETTERS`; characters
that are not listed are their UTF-8 bytes. So an unknown word is always split the same way, and spelling, reversing and
copying it is a rule that a small model can learn. Digits are always single tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tools.quire_tiny import facts
from tools.quire_tiny.chat import MARKER_TOKENS, SPECIAL_TOKENS, render

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "quire-tiny"
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
WORDS_END = 1024  # markers, bytes and words come first, so that letters could be added without renumbering them
# Letters and marks of two or three bytes that are one token each: a small model copies one token per letter far better
# than pairs of bytes of which the first is always the same.
LETTERS = (
    "–—‘’“”„…•€£§°«»¿¡"
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿ"
    "āăąćčďđēęěğīįıłńňōőœřśşšșťțūůűźżžĄĆČĘĞİŁŐŒŘŚŞŠȚŰŻŽ"
    "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ"
    "абвгдежзийклмнопрстуфхцчшщъыьэюяёіїєґАБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЫЭЮЯЁІ"
)
# skills full of words that are better split into letters
NOT_COUNTED = {"spelling", "reversing", "casing", "letters", "repetition", "memory", "accents", "scripts"}


def byte_symbols() -> list[str]:
    """The 256 printable characters that stand for bytes in byte-level BPE, in the order of the bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, others = {b: chr(b) for b in kept}, 0
    for b in range(256):
        if b not in symbols:
            symbols[b] = chr(256 + others)
            others += 1
    return [symbols[b] for b in range(256)]


def count_words(seed: int, conversations: int) -> Counter[str]:
    """How often each word (with its leading space) occurs in generated conversations."""
    from tools.quire_tiny.data import conversation

    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(conversations):
        example = conversation(rng, held=False)
        if NOT_COUNTED.isdisjoint(example.skills):
            text = "".join(part for part, _ in render(example.messages, example.tools))
            counts.update(w for w in regex.findall(PATTERN, text) if len(w) >= 2 and not w.isspace())
    return counts


def everyday_words() -> set[str]:
    """Words that people ask to have spelled: they stay letters, so that spelling them is a rule.

    Nouns that the answers about quire need are left out.
    """
    needed = {
        word for _, answer in (*facts.IDENTITY, *facts.QUIRE) for word in regex.findall(r"\p{L}+", answer.lower())
    }
    listed = {word for items in facts.LISTS.values() for item in items for word in item.lower().split()}
    return ({*facts.NOUNS, *facts.ADJECTIVES, *facts.COLOURS} | listed) - needed


def frequent_words(seed: int, conversations: int = 30_000) -> list[str]:
    """Words (with their leading space) for the part of the vocabulary that is left by the markers and the bytes, most
    frequent first.
    """
    split = everyday_words()
    ranked = sorted(count_words(seed, conversations).items(), key=lambda item: (-item[1], item[0]))
    words = [word for word, _ in ranked if word.isascii() and word.strip().lower() not in split]
    return words[: WORDS_END - 256 - len(SPECIAL_TOKENS) - len(MARKER_TOKENS)]


def words_of(tokenizer: Tokenizer) -> list[str]:
    """The words of an earlier vocabulary, in the order of their ids."""
    vocab = tokenizer.get_vocab()
    return [
        tokenizer.decode([i])
        for token, i in sorted(vocab.items(), key=lambda item: item[1])
        if len(token) > 1 and token not in (*SPECIAL_TOKENS, *MARKER_TOKENS) and tokenizer.decode([i]).isascii()
    ]


def build(words: list[str]) -> Tokenizer:
    symbols = byte_symbols()
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *MARKER_TOKENS, *symbols])}
    for word in words:
        vocab.setdefault("".join(symbols[b] for b in word.encode()), len(vocab))
    merges: dict[tuple[str, str], None] = {}
    for letter in LETTERS:
        first, *rest = (symbols[b] for b in letter.encode())
        for symbol in rest:
            merges[first, symbol] = None
            first += symbol
            vocab.setdefault(first, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    return tokenizer


def vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """The words of letters that are one token after a space, sorted: those whose spelling the model has to learn one by
    one.
    """
    words = {
        token[1:]
        for token in tokenizer.get_vocab()
        if token.startswith("Ġ") and len(token) > 2 and token[1:].isascii() and token[1:].isalpha()
    }
    return sorted(words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build tokenizer.json and tokenizer_config.json of quire-tiny.")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep-words",
        type=Path,
        metavar="FOLDER",
        help=(
            "take the words of this folder's tokenizer.json, so that weights trained with it can be trained on "
            "(train.py --warm-start)"
        ),
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    words = (
        words_of(Tokenizer.from_file(str(args.keep_words / "tokenizer.json")))
        if args.keep_words
        else frequent_words(args.seed)
    )
    tokenizer = build(words)
    tokenizer.save(str(args.output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (args.output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens, {len(words)} words")


if __name__ == "__main__":
    main()
