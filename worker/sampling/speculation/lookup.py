"""Drafts from existing text: the request's own prompt and output, earlier texts of the same client, or a
prediction that came with the request.

The last tokens of the output are searched for, and the tokens that followed them before are the draft. Nothing is built
when a request arrives: one search is a comparison of all tokens with the last one, at some 4 tokens per nanosecond, and
then of the tokens before those that are equal, of which few soon remain.
"""

from __future__ import annotations

import numpy as np

from quire.worker.sampling.speculation.drafter import History
from quire.worker.sampling.speculation.earlier import BETWEEN, EarlierTexts

MAX_SEARCHED = 1 << 15  # the newest tokens of a request, which bounds a search to some 40 us
_AFTER_REJECTION = 3  # tokens that must agree with a prediction or earlier text for it to be followed again
_SURE = 8  # tokens of a match with which no other earlier text is searched for


def longest_match(text: np.ndarray, tail: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """Return (index after, length) of the last occurrence in `text` of the longest end of `tail`, of at most `high`
    tokens.

    (0, 0) if it has fewer than `low` tokens.
    """
    if len(tail) < low or not len(text):
        return 0, 0
    ends = np.flatnonzero(text == tail[-1])
    length, best = 1, 0
    while len(ends):
        best = int(ends[-1]) + 1
        if length == min(high, len(tail)):
            break
        ends = ends[ends >= length]
        longer = ends[text[ends - length] == tail[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return (best, length) if best and length >= low else (0, 0)


class LookupDrafter:
    """Tokens after the last occurrence of the request's last tokens in its prompt or output."""

    def __init__(self, low: int, high: int, by_match: bool) -> None:
        """Look up matches of at least `low` and at most `high` tokens; `by_match`: drafts are no longer
        than the match.
        """
        self.low, self.high, self.by_match = low, high, by_match

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        tokens = history.tokens[-MAX_SEARCHED:]
        start, length = self.match(history)
        if not start:
            return []
        limit = self.capped(limit, length)
        draft = tokens[start : start + limit].tolist()
        # The end of the text may be within the period of a repetition.
        period = len(tokens) - start
        while len(draft) < limit:
            draft.append(draft[len(draft) - period])
        return draft

    def match(self, history: History) -> tuple[int, int]:
        """Return (index after, length) of the longest match in the newest `MAX_SEARCHED` tokens."""
        size, tokens = len(history.tokens), history.tokens[-MAX_SEARCHED:]
        if history.own_match[0] != size:
            low = 1 if history.has_grammar else self.low  # the grammar refuses most wrong drafts
            history.own_match = size, *longest_match(tokens[:-1], tokens, low, self.high)
        return history.own_match[1:]

    def capped(self, limit: int, length: int) -> int:
        return min(limit, length) if self.by_match else limit


class EarlierDrafter:
    """Tokens after the longest match in earlier texts of the same scope, if it is longer than in the request's text.

    Once found, a text is followed even after a mismatch.
    """

    def __init__(self, texts: EarlierTexts, own: LookupDrafter) -> None:
        self.texts, self.own = texts, own

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        tail, (start, length) = history.tokens[-self.own.high :], (0, 0)
        if history.source is not None:
            start, length = longest_match(history.source, tail, max(self.own.low, _AFTER_REJECTION), self.own.high)
        if length < min(_SURE, self.own.high) and (found := self.texts.find(history.scope, tail)) is not None:
            history.source = found
            start, length = longest_match(found, tail, self.own.low, self.own.high)
        if length <= self.own.match(history)[1]:
            return []
        draft = history.source[start : start + self.own.capped(limit, length)].tolist()
        return draft[: draft.index(BETWEEN)] if BETWEEN in draft else draft


class PredictionDrafter:
    """The rest of the request's prediction, from where the output is in it."""

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        if not history.prediction:
            return []
        outputs, prediction = history.outputs, np.array(history.prediction, dtype=np.int32)
        size = len(outputs)
        if np.array_equal(outputs, prediction[:size]):
            return prediction[size : size + limit].tolist()
        start, _ = longest_match(prediction, outputs, _AFTER_REJECTION, 16)
        return prediction[start : start + limit].tolist() if start else []
