"""Tokens that contain, or begin, a DRY sequence breaker (`worker/sampling/chain/dry.py`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

MAX_TAIL = 20  # tokens after the first one of a breaker
_CACHED = 256
_END = b"\xff"  # ends a token; no byte of UTF-8

Sequences = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class BreakerIndex:
    """Finds a text in the tokens of a vocabulary. `encode` turns texts into token ids, without special tokens."""

    def __init__(self, tokens: Iterable[bytes], encode: Callable[[list[str]], list[list[int]]]):
        tokens, self._starts, at = [token + _END for token in tokens], [], 0
        for token in tokens:
            self._starts.append(at)
            at += len(token)
        self._bytes = b"".join(tokens)
        self._encode = encode
        self.find = lru_cache(_CACHED)(self._find)

    def _find(self, text: str) -> tuple[tuple[int, ...], Sequences]:
        """Return the tokens that contain `text`, and the sequences of tokens across which it may lie: (tokens that end
        with its beginning, the tokens of the rest).
        """
        whole = dict.fromkeys(self._owners(text.encode()))
        starts: dict[str, tuple[int, ...]] = {}
        for place in range(1, len(text)):
            ending = self._owners(text[:place].encode() + _END)
            if first := tuple(token_id for token_id in ending if token_id not in whole):
                starts[text[place:]] = first
        rests = self._encode(list(starts)) if starts else []
        pairs = zip(starts.values(), rests, strict=True)
        return tuple(whole), tuple((first, tuple(rest[:MAX_TAIL])) for first, rest in pairs if rest)

    def _owners(self, sought: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes, with the end, contain `sought`."""
        at = self._bytes.find(sought)
        while at >= 0:
            token_id = bisect_right(self._starts, at) - 1
            yield token_id
            following = token_id + 1
            at = self._bytes.find(sought, self._starts[following]) if following < len(self._starts) else -1
