"""Patterns of numbers whose bounds the library does not hold exactly: it reads bounds as doubles, and fails from 18
digits on. Numbers are written without exponents, as the library writes those with bounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

EXACT = 2**53  # the library's bounds are exact up to this magnitude
_MOST = int(sys.float_info.max)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def is_finite(number: float) -> bool:
    """Return whether `number` is within the range of a double; integers may have any number of digits."""
    return -_MOST <= number <= _MOST if isinstance(number, int) else math.isfinite(number)


def without_vacuous(bounds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds without those that exclude no double."""
    lower = {name: bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds}
    upper = {name: bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds}
    return {name: value for name, value in lower.items() if value > -_MOST} | {
        name: value for name, value in upper.items() if value < _MOST
    }


def are_large(bounds: Mapping[str, Any]) -> bool:
    return any(abs(bounds[name]) > EXACT for name in BOUNDS if name in bounds)


def integers(bounds: Mapping[str, Any]) -> str | None:
    """Return the pattern of the integers within `bounds`; None if there are none."""
    low, high = _limits(bounds)
    low = None if low is None else math.ceil(low[0]) + (low[1] and low[0].denominator == 1)
    high = None if high is None else math.floor(high[0]) - (high[1] and high[0].denominator == 1)
    return _joined([_sign("-", _digits(*_part(low, high, -1, 1))), _digits(*_part(low, high, 1, 0))])


def numbers(bounds: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Return the numbers within `bounds`: a pattern of those beyond `EXACT`, and bounds of the others, which the
    library holds; None: there are none.
    """
    low, high = _limits(bounds)
    patterns = []
    for sign, text in ((-1, "-"), (1, "")):
        near, far = (low, high) if sign == 1 else (_mirrored(high), _mirrored(low))
        patterns.append(_sign(text, _decimals(near, far)))
    inner: dict[str, Any] | None = {"minimum": -EXACT, "maximum": EXACT}
    for limit, name, exclusive, inside in (
        (low, "minimum", "exclusiveMinimum", 1),
        (high, "maximum", "exclusiveMaximum", -1),
    ):
        if limit is None or limit[0] * inside < -EXACT:
            continue
        if limit[0] * inside > EXACT or (limit[0] * inside == EXACT and limit[1]):
            return _joined(patterns), None
        del inner[name]
        inner[exclusive if limit[1] else name] = _plain(limit[0])
    return _joined(patterns), inner


_Limit = tuple[Fraction, bool]  # and whether it is excluded


def _limits(bounds: Mapping[str, Any]) -> tuple[_Limit | None, _Limit | None]:
    lower = [(Fraction(bounds[name]), name[0] == "e") for name in ("minimum", "exclusiveMinimum") if name in bounds]
    upper = [(Fraction(bounds[name]), name[0] == "e") for name in ("maximum", "exclusiveMaximum") if name in bounds]
    return max(lower, default=None), min(upper, key=lambda limit: (limit[0], not limit[1]), default=None)


def _mirrored(limit: _Limit | None) -> _Limit | None:
    return None if limit is None else (-limit[0], limit[1])


def _plain(number: Fraction) -> float:
    return int(number) if number.denominator == 1 else float(number)


def _part(low: int | None, high: int | None, sign: int, least: int) -> tuple[int, int | None]:
    """Return the absolute values, from `least` on, of the integers of one sign."""
    if sign < 0:
        low, high = None if high is None else -high, None if low is None else -low
    return max(least if low is None else low, least), high


def _decimals(near: _Limit | None, far: _Limit | None) -> str | None:
    """Return the pattern of numbers above `EXACT` between two limits, which are whole if above `EXACT`."""
    first, excluded = EXACT, True
    if near is not None and near[0] > EXACT:
        first, excluded = int(near[0]), near[1]
    parts = []
    if far is None or far[0] > first:
        fraction = r"(\.[0-9]+)?"
        last = None if far is None else int(far[0]) - 1
        parts.append(rf"{first}\.[0-9]*[1-9][0-9]*" if excluded else f"{first}{fraction}")
        if (more := _digits(first + 1, last)) is not None:
            parts.append(f"({more}){fraction}")
    if far is not None and (far[0] > first or (far[0] == first and not excluded)) and not far[1]:
        parts.append(rf"{int(far[0])}(\.0+)?")
    return _joined(parts)


def _sign(sign: str, pattern: str | None) -> str | None:
    return None if pattern is None else f"{sign}({pattern})"


def _joined(patterns: list[str | None]) -> str | None:
    return "|".join(filter(None, patterns)) or None


def _digits(low: int, high: int | None) -> str | None:
    """Return the pattern of the integers from `low` (at least 0) to `high`."""
    if high is not None and high < low:
        return None
    least = len(str(low))
    if high is None:
        return f"{_between(str(low), '9' * least)}|[1-9][0-9]{{{least},}}"
    parts = []
    for size in range(least, len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        parts.append(_between(str(first), str(last)))
    return "|".join(parts)


def _between(first: str, last: str) -> str:
    """Return the pattern of numbers from `first` to `last`, of equal length. The digits are halved, so that groups are
    nested only as deep as the logarithm of their length: the library takes some 250 levels, and a double has 309
    digits.
    """
    size = len(first)
    if first == last:
        return first
    if size == 1:
        return f"[{first}-{last}]"
    if not first.strip("0") and not last.strip("9"):
        return f"[0-9]{{{size}}}"
    cut = size // 2
    rest = size - cut
    low, high = int(first[:cut]), int(last[:cut])
    if low == high:
        return f"{first[:cut]}({_between(first[cut:], last[cut:])})"
    parts = []
    if first[cut:].strip("0"):
        parts.append(f"{first[:cut]}({_between(first[cut:], '9' * rest)})")
        low += 1
    if last[cut:].strip("9"):
        parts.append(f"{last[:cut]}({_between('0' * rest, last[cut:])})")
        high -= 1
    if low <= high:
        parts.append(f"({_between(f'{low:0{cut}}', f'{high:0{cut}}')})[0-9]{{{rest}}}")
    return "|".join(parts)
