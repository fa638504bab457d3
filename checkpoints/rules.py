"""Rules for a value in a file of a model: its type and range."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MAX_LAYERS = 1024


class Whole(NamedTuple):
    """A whole number, or a list of them, one per layer, if `per_layer`, or "auto" if `auto`."""

    low: int
    high: int
    per_layer: bool = False
    auto: bool = False

    def fits(self, value: Any) -> bool:
        if self.auto and value == "auto":
            return True
        if self.per_layer and isinstance(value, list):
            return len(value) <= MAX_LAYERS and all(entry is None or self._fits(entry) for entry in value)
        return self._fits(value)

    def _fits(self, value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high

    def __str__(self) -> str:
        others = (" or a list of them" if self.per_layer else "") + (' or "auto"' if self.auto else "")
        return f"a whole number from {self.low} to {self.high}{others}"


class Number(NamedTuple):
    """A number, or a list of them, one per layer, if `per_layer`."""

    low: float
    high: float
    per_layer: bool = False

    def fits(self, value: Any) -> bool:
        if self.per_layer and isinstance(value, list):
            return 0 < len(value) <= MAX_LAYERS and all(self._fits(entry) for entry in value)
        return self._fits(value)

    def _fits(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}" + (" or a list of them" if self.per_layer else "")


class Kind(NamedTuple):
    """A value of one of `types`; if it is a list, its entries are of the types `entries`."""

    name: str
    types: tuple[type, ...]
    entries: tuple[type, ...] = ()

    def fits(self, value: Any) -> bool:
        if (isinstance(value, bool) and bool not in self.types) or not isinstance(value, self.types):
            return False
        return not isinstance(value, list) or not self.entries or all(isinstance(e, self.entries) for e in value)

    def __str__(self) -> str:
        return self.name


Rule = Whole | Number | Kind
FLAG = Kind("true or false", (bool,))
TEXT = Kind("a text", (str,))
TEXTS = Kind("a list of texts", (list,), (str,))
OBJECT = Kind("an object", (dict,))


def printable(value: Any) -> str:
    """Return a value as an error message shows it, at most about 80 characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "a number of many digits"
    return text if len(text) <= 80 else text[:80] + "..."
