"""Compare the tokens of two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_same_vocabulary(model: str, other: str, setting: str) -> None:
    """Raise ValueError, naming `setting`, if the tokens of two model folders differ. Folders without tokenizer.json are
    not compared.
    """
    mine, theirs = (_tokens(Path(folder, "tokenizer.json")) for folder in (model, other))
    if mine is None or theirs is None or mine == theirs:
        return
    different = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    first = different[0]
    raise ValueError(
        f"{setting}: the vocabularies differ in {len(different)} tokens: token {first} is {mine.get(first)!r} in "
        f"{model} and {theirs.get(first)!r} in {other}"
    )


def _tokens(path: Path) -> dict[int, str] | None:
    """Return the tokens by id; None if there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    vocab = content.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        tokens = {i: token for token, i in vocab.items()}
    else:  # for Unigram: [token, score]
        tokens = {i: pair[0] for i, pair in enumerate(vocab)}
    return tokens | {added["id"]: added["content"] for added in content.get("added_tokens", ())}
