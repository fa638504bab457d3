"""Sizes in bytes as people read them."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """A size with at least three significant digits: 640 B, 1.20 GiB, 139 GiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{size} B" if unit == "B" else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
