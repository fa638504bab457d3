"""The tokenizer of quire-tiny: a byte-level BPE vocabulary without merges, whose words are whole tokens and whose other text is one token per byte.

A word that is in the vocabulary is one token; every other word is its letters (`ignore_merges`: a pre-token that is in the vocabulary is taken whole, and there is
no merge to build anything else). So an unknown word is always split the same way, and spelling, reversing and copying it is a rule that a small model can learn.
Digits are always single tokens.
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
VOCAB_SIZE = 1024
NOT_COUNTED = {"spelling", "reversing", "casing", "letters", "repetition", "memory"}  # skills full of words that are better split into letters


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
    """Words that people ask to have spelled: they stay letters, so that spelling them is a rule. Nouns that the answers about quire need are left out."""
    needed = {word for _, answer in (*facts.IDENTITY, *facts.QUIRE) for word in regex.findall(r"\p{L}+", answer.lower())}
    listed = {word for items in facts.LISTS.values() for item in items for word in item.lower().split()}
    return ({*facts.NOUNS, *facts.ADJECTIVES, *facts.COLOURS} | listed) - needed


def build(seed: int = 0, conversations: int = 30_000) -> Tokenizer:
    symbols, split = byte_symbols(), everyday_words()
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *MARKER_TOKENS])}
    for symbol in symbols:
        vocab[symbol] = len(vocab)
    for word, _ in sorted(count_words(seed, conversations).items(), key=lambda item: (-item[1], item[0])):
        token = "".join(symbols[b] for b in word.encode())
        if len(vocab) < VOCAB_SIZE and word.strip().lower() not in split:
            vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    return tokenizer


def vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """The words of letters that are one token after a space, sorted: those whose spelling the model has to learn one by one."""
    words = {token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ") and len(token) > 2 and token[1:].isascii() and token[1:].isalpha()}
    return sorted(words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build tokenizer.json and tokenizer_config.json of quire-tiny.")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = build(args.seed)
    tokenizer.save(str(args.output / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False, "add_bos_token": False, "model_input_names": ["input_ids", "attention_mask"]}
    (args.output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    words = vocabulary_words(tokenizer)
    print(f"{tokenizer.get_vocab_size()} tokens, {len(words)} words")


if __name__ == "__main__":
    main()
