"""Times of words, from the cross-attention of a text's tokens to the audio, as in Whisper's and transformers' code."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.server.media.audio.model import STEP

if TYPE_CHECKING:
    import numpy as np

_OPENING = "\"'“¡¿([{-"  # marks that belong to the next word
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # and to the word before
_BROKEN = "\ufffd"  # in the text of tokens that end within a character


@dataclass(slots=True)
class Word:
    """A word with the space before it, and the indices of its tokens."""

    text: str
    first: int
    last: int  # index after its last token


def read_times(data: bytes, positions: int) -> list[float]:
    """Return the second at which each token begins, from the engine's float32 matrix."""
    import numpy as np

    return (begins(np.frombuffer(data, np.float32).reshape(-1, positions)) * STEP).tolist()


def begins(matrix: np.ndarray) -> np.ndarray:
    """Return the position at which each row of `matrix` `[tokens, positions]` begins on the path from its first to its
    last entry with the largest sum (dynamic time warping).

    All cells of an antidiagonal depend only on the previous two, so each antidiagonal is one operation.
    """
    import numpy as np

    num_rows, num_columns = matrix.shape
    step = np.full((num_rows + 1, num_columns + 1), 2, np.int8)  # 0: from both, 1: from the row before, 2: the column
    step[:, 0] = 1
    shape = num_rows + 1
    older = np.full(shape, np.inf, np.float32)  # costs of the antidiagonals, by row
    newer = older.copy()
    older[0] = 0.0
    for total in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, total - num_columns), min(num_rows, total - 1) + 1)
        columns = total - rows
        both, above, left = older[rows - 1], newer[rows - 1], newer[rows]
        from_both = (both < above) & (both < left)
        from_above = ~from_both & (above < both) & (above < left)
        cost = np.full(shape, np.inf, np.float32)
        best = np.where(from_both, both, np.where(from_above, above, left))
        cost[rows] = best - matrix[rows - 1, columns - 1].astype(np.float64)
        step[rows, columns] = np.where(from_both, 0, np.where(from_above, 1, 2))
        older, newer = newer, cost
    found = np.zeros(num_rows, np.int64)
    row, column = num_rows, num_columns
    while row > 0:
        found[row - 1] = max(column - 1, 0)
        kind = step[row, column]
        row, column = row - (kind != 2), column - (kind != 1)
    return found


def split_words(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], spaced: bool) -> list[Word]:
    """Return the words of a text. Without `spaced`, each character is one; marks belong to the word next to them."""
    words = _characters(token_ids, decode)
    if spaced:
        words = _joined_at_spaces(words)
    return _with_marks(words)


def _characters(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Word]:
    """Return the shortest runs of tokens that are whole characters."""
    whole, words, first, length = decode(token_ids), [], 0, 0
    for last in range(1, len(token_ids) + 1):
        text = decode(token_ids[first:last])
        at = length + text.find(_BROKEN)
        if _BROKEN not in text or at >= len(whole) or whole[at] == _BROKEN:
            words.append(Word(text, first, last))
            first, length = last, length + len(text)
    return words


def _joined_at_spaces(parts: list[Word]) -> list[Word]:
    words: list[Word] = []
    for part in parts:
        begins_word = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if begins_word or not words:
            words.append(part)
        else:
            words[-1] = Word(words[-1].text + part.text, words[-1].first, part.last)
    return words


def _with_marks(words: list[Word]) -> list[Word]:
    for i in reversed(range(len(words) - 1)):
        word, following = words[i], words[i + 1]
        if word.text.startswith(" ") and word.text.strip() in _OPENING:
            words[i : i + 2] = [Word(word.text + following.text, word.first, following.last)]
    found: list[Word] = []
    for word in words:
        if found and word.text in _CLOSING and not found[-1].text.endswith(" "):
            found[-1] = Word(found[-1].text + word.text, found[-1].first, word.last)
        else:
            found.append(word)
    return found
