"""Sizes in bytes as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_DIGITS = 6  # digits added at most; sizes that still look equal are written in bytes


def format_bytes(size: int) -> str:
    """Return a size with at least three significant digits: 640 B, 1.20 GiB, 139 GiB."""
    return _format(size, 0)[0]


def format_each(*sizes: int) -> list[str]:
    """Return sizes for a comparison, each as by `format_bytes`, with more digits if different sizes look equal."""
    for digits in range(_MOST_DIGITS + 1):
        found = [_format(size, digits) for size in sizes]
        if len({shown for _, shown in found}) == len(set(sizes)):
            return [text for text, _ in found]
    return [f"{size:,} B" for size in sizes]


def _format(size: int, more_digits: int) -> tuple[str, float]:
    """Return a size in the largest unit that leaves a number of at least 1, and the bytes that the text states."""
    value, unit = float(abs(size)), 0
    while unit < len(_UNITS) - 1 and float(_number(value, unit, more_digits)) >= 1024:
        value, unit = value / 1024, unit + 1
    number = _number(value, unit, more_digits)
    return f"{'-' if size < 0 else ''}{number} {_UNITS[unit]}", float(number) * 1024**unit * (-1 if size < 0 else 1)


def _number(value: float, unit: int, more_digits: int) -> str:
    if unit == 0:
        return f"{value:.0f}"
    return f"{value:.{more_digits + (0 if value >= 100 else 1 if value >= 10 else 2)}f}"
