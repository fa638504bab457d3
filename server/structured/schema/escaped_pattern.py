"""A regular expression -> one for the same texts as they are written in another place: within a JSON string, where some
characters are escaped, or before an end tag, where some cannot occur.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from re import _constants as ops
from re import _parser as parser
from typing import Any

Writing = Mapping[str, str | None]  # characters that are not written as they are -> how they are; None: not at all

# In a JSON string. Control characters stay unescaped, which `CustomInput` reads, too: an escape would begin like the
# other escapes, and a terminal that can continue with one of those would not let it follow.
IN_JSON: Writing = {'"': '\\"', "\\": "\\\\"}
_CLASSES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL


class PatternError(ValueError):
    """The pattern is invalid, or has something that cannot be rewritten."""


def written(pattern: str, flags: str, writing: Writing) -> str:
    """Return the pattern, without slashes. `flags` are letters of `imsu`. Raises PatternError."""
    if unknown := set(flags) - set("imsu"):
        raise PatternError(f"the flag {min(unknown)!r} is not supported here")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Rust's nested sets, which Python reads differently
            parsed = parser.parse(pattern.replace("\\/", "/"), sum(getattr(re, flag.upper()) for flag in set(flags)))
    except (re.error, OverflowError, Warning) as error:
        raise PatternError(str(error)) from None
    return _Writer(writing).sequence(parsed, parsed.state.flags)


def written_text(text: str, writing: Writing, ignore_case: bool) -> str:
    """Return the pattern of one text."""
    writer = _Writer(writing)
    return "".join(writer.one_of([(ops.LITERAL, ord(char))], re.IGNORECASE if ignore_case else 0) for char in text)


class _Writer:
    def __init__(self, writing: Writing):
        self.writing = writing
        self.usual = f"[^{''.join(map(_escaped, writing))}]"

    def sequence(self, parts: Any, flags: int) -> str:
        return "".join(self.part(op, value, flags) for op, value in parts)

    def part(self, op: Any, value: Any, flags: int) -> str:
        if op is ops.LITERAL:
            return self.one_of([(op, value)], flags)
        if op is ops.NOT_LITERAL:
            return self.one_of([(ops.NEGATE, None), (ops.LITERAL, value)], flags)
        if op is ops.ANY:
            newline = [] if flags & re.DOTALL else [(ops.LITERAL, ord("\n"))]
            return self.one_of([(ops.NEGATE, None), *newline], flags)
        if op is ops.IN:
            return self.one_of(value, flags)
        if op is ops.BRANCH:
            return f"(?:{'|'.join(self.sequence(branch, flags) for branch in value[1])})"
        if op is ops.SUBPATTERN:
            _, added, removed, inner = value
            if (added | removed) & ~(_FLAGS | re.UNICODE):
                raise PatternError("only the flags i, m and s are supported here")
            return f"(?:{self.sequence(inner, flags & ~removed | added)})"
        if op is ops.MAX_REPEAT:
            least, most, inner = value
            return f"(?:{self.sequence(inner, flags)}){{{least},{'' if most is ops.MAXREPEAT else most}}}"
        raise PatternError(f"{_REFUSED.get(op, str(op).lower())} is not supported")

    def one_of(self, members: Any, flags: int) -> str:
        """Return one character of a set, given as Python's parser has it."""
        negated = bool(members) and members[0][0] is ops.NEGATE
        members = members[1:] if negated else members
        others = [
            "".join(map(_escaped, instead))
            for char, instead in self.writing.items()
            if instead is not None and any(_contains(member, char) for member in members) != negated
        ]
        plain = "".join(map(_member, members))
        usual = f"[{'^' if negated else ''}{plain}]" if plain else r"(?s:.)"
        if not plain:
            usual = self.usual
        elif len(members) == 1 and not negated and members[0][0] is ops.LITERAL:
            if chr(members[0][1]) in self.writing:
                if not others:
                    raise PatternError(f"the character {chr(members[0][1])!r} cannot be written here")
                return others[0]
        else:
            usual = f"[{usual}&&{self.usual}]"
        if flags & re.IGNORECASE:
            usual = f"(?i:{usual})"
        return f"(?:{'|'.join([usual, *others])})"


_REFUSED = {
    ops.MIN_REPEAT: "a lazy quantifier",
    ops.POSSESSIVE_REPEAT: "a possessive quantifier",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.ASSERT: "look-around",
    ops.ASSERT_NOT: "look-around",
    ops.AT: "an anchor",
    ops.GROUPREF: "a reference to a group",
    ops.GROUPREF_EXISTS: "a reference to a group",
}


def _contains(member: tuple, char: str) -> bool:
    op, value = member
    if op is ops.LITERAL:
        return value == ord(char)
    if op is ops.RANGE:
        return value[0] <= ord(char) <= value[1]
    # no character of a writing is white space, a digit or a word character
    return value in (ops.CATEGORY_NOT_DIGIT, ops.CATEGORY_NOT_SPACE, ops.CATEGORY_NOT_WORD)


def _member(member: tuple) -> str:
    op, value = member
    if op is ops.LITERAL:
        return _escaped(chr(value))
    if op is ops.RANGE:
        return f"{_escaped(chr(value[0]))}-{_escaped(chr(value[1]))}"
    return _CLASSES[value]


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
