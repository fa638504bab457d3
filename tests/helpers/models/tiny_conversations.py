"""Makes conversations that the embedded model, configs/quire-tiny, was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

Encoded = tuple[list[int], list[bool]]  # token ids, and for each whether the assistant wrote it
FILE = Path(__file__).with_name("tiny_conversations.json")
NUM_MEASURED = 60  # the conversations from there on calibrate quantization


def tiny_conversations(tokenizer: Tokenizer, first: int = 0, count: int = NUM_MEASURED) -> list[Encoded]:
    """Return `count` encoded conversations, from the one with index `first` on."""
    conversations = json.loads(FILE.read_text(encoding="utf-8"))[first : first + count]
    return [_encode(tokenizer, pieces) for pieces in conversations]


def _encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Encoded:
    ids: list[int] = []
    learnt: list[bool] = []
    for text, by_assistant in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        learnt += [by_assistant] * len(piece)
    return ids, learnt
