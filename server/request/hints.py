"""Hints of a request's body: to the cache, and those that have no effect."""

from __future__ import annotations

import msgspec

MAX_UNKNOWN = 100  # names of unknown fields that are remembered
IN_MEMORY_SECONDS = 600.0


class CacheHint(msgspec.Struct, frozen=True):
    """`key` is the client's name of a conversation, "" for none."""

    key: str = ""
    seconds: float = IN_MEMORY_SECONDS


class Ignored(msgspec.Struct):
    """Dotted names of fields without effect, at most `MAX_UNKNOWN` of each: unknown fields, and known hints."""

    unknown: list[str] = []
    hints: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.unknown or self.hints)

    def record_unknown(self, name: str) -> None:
        if len(self.unknown) < MAX_UNKNOWN:
            self.unknown.append(name)

    def record_hint(self, name: str) -> None:
        if len(self.hints) < MAX_UNKNOWN:
            self.hints.append(name)
