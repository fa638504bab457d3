"""Handles JSON text that a model wrote: parses it, or passes it on as JSON in one line.

A model may write half of a surrogate pair (`"\\ud83d"`), for which UTF-8 has no bytes, and numbers that no float holds
(`1e999`). Halves become U+FFFD. Numbers are never changed: text with one that Python cannot hold is not read.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

REPLACEMENT = "\ufffd"
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)  # JSON's
WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def without_halves(json_text: str) -> str:
    r"""Return JSON text with `\ufffd` for every escape that is half of a surrogate pair."""
    if "\\ud" not in json_text.lower():
        return json_text
    return _ESCAPES.sub(lambda found: "\\ufffd" if found["half"] else found.group(), json_text)


def has_half(text: str) -> bool:
    """Return whether the text has half of a surrogate pair, which UTF-8 cannot encode."""
    return not text.isascii() and _HALF.search(text) is not None


def read(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError if it is not JSON, or has a number that Python cannot hold."""
    try:
        return json.loads(
            _HALF.sub(REPLACEMENT, without_halves(text)), parse_float=_finite, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def raw_object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments, as the parsers hand them out, in one line, with numbers and strings as they are
    written.
    """
    return msgspec.Raw(msgspec.json.format(arguments.encode(), indent=-1))


def json_string(text: str) -> str:
    """Return the JSON text of a string. Halves of surrogate pairs are escaped, because the other half may follow."""
    return json.dumps(text, ensure_ascii=has_half(text))


def escaped(text: str) -> str:
    """Return `text` escaped for the inside of a JSON string."""
    return json_string(text)[1:-1]


def atom(text: str) -> str:
    """Return the JSON text of a word or number in JSON's or Python's notation; any other word becomes a string."""
    if NUMBER.fullmatch(text):
        return text
    return WORDS.get(text.lower()) or _number(text) or json_string(text)


def _number(text: str) -> str | None:
    """Return the JSON text of a number in Python's notation: 0x1F, 1_000, .5, 1."""
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is beyond the range of a float")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
