"""Declares a setting: a dataclass field that is also a flag, a YAML key and an environment variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def opt(
    default: Any,
    help: str,
    *,
    everyday: bool = False,
    choices: tuple[str, ...] | None = None,
    hidden_choices: tuple[str, ...] = (),
    other_choices: str | None = None,
    aliases: dict[str, str] | None = None,
    repeat: bool = False,
    metavar: str | None = None,
    unit: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    other_name: str | None = None,
    removed: bool = False,
    check: Callable[[Any], object] | None = None,
):
    """Return a dataclass field that is also a flag. `everyday` fields appear in `--help`, the others in `--help-all`;
    `repeat` fields take several values.

    `unit` is "bytes" (suffixes allowed), "length" (a number of tokens, or auto) or "mapping" (`image=4`, or a JSON
    object; the value is JSON). `minimum`, `above` (exclusive) and `maximum` bound a number. `hidden_choices` are
    accepted but not advertised, like texts that match the regular expression `other_choices`; `aliases` are other
    spellings of choices, `other_name` one of the setting itself; a `secret` value is never printed; a `removed` setting
    is accepted without effect, and its help says why; `check` raises ValueError for a wrong value. `configs/options.py`
    checks all of this.
    """
    metadata = {
        "help": help,
        "everyday": everyday,
        "choices": choices,
        "hidden_choices": hidden_choices,
        "other_choices": other_choices,
        "aliases": aliases or {},
        "repeat": repeat,
        "metavar": metavar,
        "unit": unit,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "secret": secret,
        "other_name": other_name,
        "removed": removed,
        "check": check,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
