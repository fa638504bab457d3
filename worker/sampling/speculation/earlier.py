"""Earlier texts of the same client, a second source of drafts by lookup.

A scope is an API key and cache salt: texts of one scope are never searched for another. Tokens are kept in segments,
each with a table from the hash of `KEY` tokens to the position after their last occurrence. Segments are dropped from
the scope with the most segments, the least recently used one first, and all of them with the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from quire.worker.sampling.speculation.costs import Odds

KEY = 5  # tokens that must match before an earlier text is followed
SEGMENT = 1 << 14  # tokens
MAX_TOKENS = 1 << 20  # of all scopes, at 12 bytes each
MAX_SCOPE_TOKENS = 1 << 18
BETWEEN = -1  # after each text
OVERLAP = 24  # tokens of a text that are repeated where it continues
_CHUNK = 64  # tokens per hash in `_Segment.known`
_BITS = 16
_WORD = (1 << 64) - 1
_INT_FACTORS = [0x9E3779B97F4A7C15 * (2 * i + 1) ** 3 & _WORD for i in range(KEY)]
_FACTORS = np.array(_INT_FACTORS, dtype=np.uint64)


def _slots(tokens: np.ndarray) -> np.ndarray:
    """Return the place in a table of each window of `KEY` tokens."""
    wide = tokens.astype(np.uint64)
    size = len(tokens) - KEY + 1
    mixed = np.zeros(size, dtype=np.uint64)
    for i, factor in enumerate(_FACTORS):
        mixed += wide[i : i + size] * factor
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _FACTORS[0] >> np.uint64(64 - _BITS)).astype(np.int64)


def _slot(window: list[int]) -> int:
    """Return the place in a table of one window, by Python's integers: a tenth of the time of `_slots`."""
    mixed = sum(token * factor for token, factor in zip(window, _INT_FACTORS)) & _WORD
    mixed ^= mixed >> 29
    return (mixed * _INT_FACTORS[0] & _WORD) >> 64 - _BITS


class _Segment:
    """At most `SEGMENT` tokens of texts of one scope, each followed by `BETWEEN`."""

    def __init__(self) -> None:
        self.tokens = np.full(SEGMENT, BETWEEN, dtype=np.int32)
        self.table = np.zeros(1 << _BITS, dtype=np.uint16)  # 0: none
        self.size = 0
        self.known: set[int] = set()  # hashes of beginnings of texts, by chunks
        self.texts: list[tuple[str, int, int]] = []  # conversation, start, end
        self.used_at = 0

    def append(self, tokens: np.ndarray, conversation: str) -> None:
        """Add a text, for which there is room."""
        start, end = self.size, self.size + len(tokens)
        self.tokens[start:end] = tokens
        self.table[_slots(tokens[:-1])] = np.arange(start + KEY, end)  # for equal slots the last position stays
        self.texts.append((conversation, start, end))
        self.size = end + 1

    def find(self, slot: int, tail: np.ndarray) -> tuple[int, int]:
        """Return (position after, length) of a match of the end of `tail`, (0, 0) if there is none."""
        if not (end := int(self.table[slot])):
            return 0, 0
        size = min(end, len(tail))
        differs = np.flatnonzero(self.tokens[end - size : end][::-1] != tail[len(tail) - size :][::-1])
        length = int(differs[0]) if len(differs) else size
        return (end, length) if length >= KEY else (0, 0)

    def forget(self, conversation: str) -> None:
        """Overwrite the texts of a conversation, also for requests that follow them."""
        for _, start, end in [one for one in self.texts if one[0] == conversation]:
            self.tokens[start:end] = BETWEEN
            self.known.clear()


@dataclass(slots=True)
class _Scope:
    segments: list[_Segment] = field(default_factory=list)  # the newest one last
    odds: dict[type, Odds] = field(default_factory=dict)  # by source of drafts: how often they were right recently


@dataclass(slots=True)
class Progress:
    """The number of tokens kept of a request's text."""

    size: int = 0
    num_chunks: int = 0  # from its beginning, of which `hash` is the hash
    hash: int = 0


class EarlierTexts:
    """Texts by scope, of at most `capacity` tokens together."""

    def __init__(self, capacity: int = MAX_TOKENS) -> None:
        self.max_segments = max(min(capacity, MAX_TOKENS) // SEGMENT, 1)
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()  # the most recently used one last
        self._clock = 0

    @property
    def num_segments(self) -> int:
        return sum(len(scope.segments) for scope in self._scopes.values())

    def odds(self, scope: str | None, source: type) -> Odds:
        """Return how often drafts of a source were right recently for requests of a scope, if it is known."""
        known = None if scope is None else self._scopes.get(scope)
        return Odds() if known is None else known.odds.setdefault(source, Odds())

    def add(self, scope: str, conversation: str, tokens: np.ndarray, progress: Progress) -> None:
        """Keep the new tokens of a request's text; `progress` says which ones are kept already."""
        if len(tokens) <= KEY:
            return
        segments, start, new = self._use(scope).segments, progress.size, []
        while (end := (progress.num_chunks + 1) * _CHUNK) <= len(tokens):
            progress.hash = hash((progress.hash, tokens[end - _CHUNK : end].tobytes()))
            progress.num_chunks += 1
            if not progress.size and not new and any(progress.hash in segment.known for segment in segments):
                start = end
            else:
                new.append(progress.hash)
        if start < len(tokens):
            self._append(scope, conversation, tokens[max(start - OVERLAP, 0) :]).known.update(new)
        progress.size = len(tokens)

    def _append(self, scope: str, conversation: str, tokens: np.ndarray) -> _Segment:
        """Append the tokens, and return the segment in which they begin."""
        first = segment = self._with_room(scope)
        while (size := min(len(tokens), SEGMENT - segment.size - 1)) < len(tokens):
            segment.append(tokens[:size], conversation)
            tokens, segment = tokens[size - OVERLAP :], self._with_room(scope)
        if size > KEY:
            segment.append(tokens, conversation)
        return first

    def _with_room(self, scope: str) -> _Segment:
        """Return the last segment of a scope, or a new one if it is full."""
        segments = self._use(scope).segments
        if segments and SEGMENT - segments[-1].size > 2 * OVERLAP:
            return self._touched(segments[-1])
        if len(segments) >= MAX_SCOPE_TOKENS // SEGMENT:
            _drop_oldest(segments)
        elif self.num_segments >= self.max_segments:
            self._make_room()
        self._use(scope).segments.append(_Segment())
        return self._touched(self._use(scope).segments[-1])

    def _make_room(self) -> None:
        """Drop a segment of the scope with the most segments; of equal scopes, of the least recently used one."""
        name, scope = max(self._scopes.items(), key=lambda item: len(item[1].segments))
        _drop_oldest(scope.segments)
        if not scope.segments:
            del self._scopes[name]

    def _use(self, scope: str) -> _Scope:
        known = self._scopes.setdefault(scope, _Scope())
        self._scopes.move_to_end(scope)
        return known

    def _touched(self, segment: _Segment) -> _Segment:
        self._clock += 1
        segment.used_at = self._clock
        return segment

    def find(self, scope: str | None, tail: np.ndarray) -> np.ndarray | None:
        """Return the text around the longest match of the end of `tail`, of at least `KEY` tokens."""
        known = None if scope is None else self._scopes.get(scope)
        if known is None or len(tail) < KEY:
            return None
        slot, best, found = _slot(tail[-KEY:].tolist()), 0, None
        for segment in reversed(known.segments):
            _, length = segment.find(slot, tail)
            if length > best:
                best, found = length, segment
        return None if found is None else self._touched(found).tokens

    def forget(self, key: str) -> None:
        """Forget a conversation with any salt."""
        for scope in self._scopes.values():
            for segment in scope.segments:
                segment.forget(key)

    def clear(self) -> None:
        """Forget all texts."""
        for scope in self._scopes.values():
            for segment in scope.segments:
                segment.tokens.fill(BETWEEN)
        self._scopes.clear()


def _drop_oldest(segments: list[_Segment]) -> None:
    segments.remove(min(segments, key=lambda segment: segment.used_at))
