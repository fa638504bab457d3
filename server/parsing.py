"""Body bytes -> a request type of `protocol.py`, or the `BadRequest` that names the field at fault by its dotted path (`messages.0.role`).

The body is decoded to plain objects first and then converted, so that what the type does not declare can be found and judged instead of dropped.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from server.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)

MAX_NESTING = 64  # of JSON that goes through to templates
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)


def parse(body: bytes, cls: type[T], *, strict: bool = False) -> tuple[T, list[str]]:
    """The request, and the dotted names of fields nobody knows. Raises BadRequest; for unknown fields only when `strict`."""
    data = _decode(body)
    try:
        request = msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise _bad_request(error, data, cls) from None
    unknown: list[str] = []
    _judge_undeclared(data, request, "", unknown)
    if unknown and strict:
        raise BadRequest(f"Unknown parameter: {', '.join(unknown[:10])}.", param=unknown[0], code="unknown_parameter")
    return request, unknown


def _decode(body: bytes) -> dict:
    try:
        data = msgspec.json.decode(body)
    except RecursionError:
        raise BadRequest("The body's JSON is nested too deeply.") from None
    except (ValueError, UnicodeError) as error:  # msgspec's errors are ValueErrors
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("The body must be a JSON object.")
    for name in ("messages", "documents", "chat_template_kwargs"):
        if _deeper_than(data.get(name), MAX_NESTING):
            raise BadRequest(f"{name} is nested more than {MAX_NESTING} levels deep.", param=name)
    return data


def _deeper_than(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    if levels == 0:
        return True
    return any(_deeper_than(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


def _bad_request(error: msgspec.ValidationError, data: dict, cls: type) -> BadRequest:
    match = _PATH.match(str(error))
    what, path = match["what"], match["path"] or ""
    keys = [int(number) if number else name or None for name, number in re.findall(r"\.(\w+)|\[(?:(\d+)|\.\.\.)\]", path) or []]
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = ".".join([*map(str, keys), missing[1]])
        return BadRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")
    while keys and keys[-1] is None:  # a value of a dictionary: the dictionary is what we can name
        keys.pop()
    param = ".".join(map(str, keys)) or None
    return BadRequest(f"{param or 'body'}: {_readable(what)}{_shown(data, keys)}.", param=param)


def _readable(what: str) -> str:
    """`Expected `int | null`, got `str`` -> `expected int, got str`; ranges keep their limit."""
    what = what.replace(" | null", "").replace("`", "")
    return what[:1].lower() + what[1:]


def _shown(data: Any, keys: list) -> str:
    """The offending value, if it is short."""
    for key in keys:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return ""
    if isinstance(data, (int, float)) or (isinstance(data, str) and len(data) <= 100):
        return f" (value: {data!r})"
    return ""


def _judge_undeclared(data: Any, value: Any, prefix: str, unknown: list[str]) -> None:
    """Refuse meaningful fields that we do not support, collect the unknown ones, here and in the Structs below."""
    if isinstance(value, list):
        if value and isinstance(value[0], msgspec.Struct):
            for i, item in enumerate(value):
                _judge_undeclared(data[i], item, f"{prefix}{i}.", unknown)
        return
    cls = type(value)
    declared = cls.__struct_fields__
    for name, given in data.items():
        path = prefix + name
        if name in declared:
            child = getattr(value, name)
            if isinstance(child, (msgspec.Struct, list)):
                _judge_undeclared(given, child, f"{path}.", unknown)
        elif name in cls.unsupported:
            if given is not None and given not in cls.unsupported[name]:
                raise BadRequest(f"{path} is not supported by this server.", param=path, code="unsupported_parameter")
        elif name not in cls.harmless:
            unknown.append(path[:100])
