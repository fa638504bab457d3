"""Integers given as text: form fields, query strings, headers."""

from __future__ import annotations

from quire.server.errors import BadRequest

_MAX_DIGITS = 40  # int() of a long text takes long, and Python refuses thousands of digits


def bounded_int(text: object, lowest: int, highest: int, param: str) -> int:
    """Return `text` as an integer in ASCII digits. Raises BadRequest for the field or header `param` unless it is one
    from `lowest` to `highest`.
    """
    digits = text.removeprefix("-") if isinstance(text, str) else ""
    if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS and lowest <= int(text) <= highest:
        return int(text)
    raise BadRequest(f"{param} must be an integer between {lowest} and {highest}.", param=param)
