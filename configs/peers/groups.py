"""Groups flags of other servers; the tables of this folder consist of such groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Convert = Callable[[str], Any]


class Kind(StrEnum):
    """The effect of another server's flag."""

    SAME = "same"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Group:
    """Holds flags of one kind with the same meaning. `names` is text: `--switch`, `--[no-]switch`, `--one=`,
    `--optional=?`, `--several=+`, `VARIABLE`.

    A `renamed` flag sets `option`, or its part `key`, to the result of `convert` for the text (None leaves the setting
    alone), or to `value` if it is a switch. A `refused` flag with one of the `harmless` values has no effect.
    """

    kind: Kind
    names: str
    option: str = ""
    key: str = ""
    convert: Convert | None = None
    value: Any = None
    note: str = ""
    harmless: tuple[str, ...] = ()


def same(names: str) -> Group:
    """Return flags that quire has, too."""
    return Group(Kind.SAME, names)


def renamed(
    option: str, names: str, convert: Convert | None = None, *, key: str = "", value: Any = None, note: str = ""
) -> Group:
    """Return flags that have another name here; `note` says how the meaning differs."""
    return Group(Kind.RENAMED, names, option, key, convert, value, note)


def no_effect(note: str, names: str) -> Group:
    """Return flags that ask for default behavior, or tune features that quire does not have."""
    return Group(Kind.NO_EFFECT, names, note=note)


def refused(note: str, names: str, harmless: str = "") -> Group:
    """Return flags that change answers, routes or safety in a way that quire cannot, except with the values
    `harmless`.
    """
    return Group(Kind.REFUSED, names, note=note, harmless=tuple(harmless.split()))
