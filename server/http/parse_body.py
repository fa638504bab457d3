"""Parses a body into a request type of `protocol.py`, or raises `BadRequest` with the dotted path of the invalid field
(`messages.0.role`).

Only declared fields are decoded. Undeclared fields are skipped and then checked by name, so that a body with a million
of them uses no memory. Fields without effect are noted: unknown fields, the `hints` of a type unless they hold a
neutral value, and what a type's method `without_effect` returns: paths of values of declared fields, below its own, and
the type of each, "" for none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.server.errors import BadRequest
from quire.server.parsers.model_json import without_halves
from quire.server.request.hints import Ignored
from quire.server.request.limits import MAX_TEMPLATE_KWARGS_BYTES
from quire.server.values import Json

T = TypeVar("T", bound=msgspec.Struct)

MAX_NESTING = 64  # levels of JSON that is passed to templates
MAX_FIELDS = 256  # per object
MAX_MEMBERS = 2**16  # per body, over all objects; decoding them holds the interpreter for about 20 ms
_MAX_BYTES = {"chat_template_kwargs": MAX_TEMPLATE_KWARGS_BYTES, "tools": 2**20, "functions": 2**20}  # as JSON
# for every body: `cache_hint.py`, `time_limit.py`
EVERYWHERE = frozenset({"prompt_cache_key", "prompt_cache_retention", "session_id", "timeout"})
_NEUTRAL_BYTES = 64  # maximum length of a neutral value of an unsupported field
_SHOWN_BYTES = 2**16  # longer bodies are not searched for the value to show in an error
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_Members = dict[str, msgspec.Raw]  # members of an object, with raw values
_members = msgspec.json.Decoder(_Members).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parse(body: bytes, cls: type[T], *, strict: bool = False) -> tuple[T, Ignored]:
    """Return the request, and its fields without effect.

    Raises BadRequest; for unknown fields only when `strict`.
    """
    if _may_have_more_members(body, MAX_MEMBERS):
        raise BadRequest(f"The body's objects have more than {MAX_MEMBERS} fields in all.")
    try:
        members = _members(body)
        for name, limit in _MAX_BYTES.items():
            if len(members.get(name, b"")) > limit:
                raise BadRequest(f"{name} has more than {limit} bytes.", param=name)
        request = msgspec.json.decode(body, type=cls)
    except RecursionError:
        raise BadRequest("The body's JSON is nested too deeply.") from None
    except msgspec.ValidationError as error:
        if str(error).startswith("Expected `object`") and " - at" not in str(error):
            raise BadRequest("The body must be a JSON object.") from None
        raise bad_request(error, _untyped(body) if len(body) <= _SHOWN_BYTES else None) from None
    except (ValueError, UnicodeError) as error:  # msgspec's errors are ValueErrors
        raise BadRequest(f"The body is not valid JSON: {_why(error, body)}") from None
    if deeper_than(getattr(request, "chat_template_kwargs", None), MAX_NESTING):
        raise BadRequest(
            f"chat_template_kwargs is nested more than {MAX_NESTING} levels deep.", param="chat_template_kwargs"
        )
    ignored = Ignored()
    _check_undeclared(members, request, "", ignored)
    if strict and (unknown := ignored.unknown):
        param = unknown[0].partition(" (")[0]
        raise BadRequest(f"Unknown parameter: {', '.join(unknown[:10])}.", param=param, code="unknown_parameter")
    return request, ignored


def _untyped(body: bytes) -> Any:
    """Return the body's data, or None if it has a number that Python cannot hold as JSON means it (1e999)."""
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):  # or bytes that are no UTF-8, which typed decoding skips
        return None


def is_left_out(item: Json) -> bool:
    """Return whether `item` has a type that is ignored like an unknown field (the class's `left_out` pattern)."""
    pattern = getattr(type(item), "left_out", None)
    return pattern is not None and pattern.fullmatch(item.type) is not None


def _why(error: ValueError, body: bytes) -> str:
    if without_halves(text := body.decode("latin-1")) != text:
        return "a string has half of a surrogate pair, which is no Unicode text"
    return str(error)


def _may_have_more_members(body: bytes, limit: int) -> bool:
    """Return whether the body has more colons and more strings than `limit`; every member has one of each."""
    if body.count(b":") <= limit:
        return False
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # strings may contain colons and escaped quotes
    return without_escapes.count(b'"') // 2 > limit


def deeper_than(value: Json, levels: int) -> bool:
    """Return whether JSON data has more than `levels` levels of objects and lists."""
    if not isinstance(value, (dict, list)):
        return False
    if levels == 0:
        return True
    return any(deeper_than(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


def bad_request(error: msgspec.ValidationError, data: Json) -> BadRequest:
    """Return the error for a value of the wrong type; it names the field and shows its value from `data`."""
    match = _PATH.match(str(error))
    what, path = match["what"], match["path"] or ""
    keys = [
        int(number) if number else name or None
        for name, number in re.findall(r"\.(\w+)|\[(?:(\d+)|\.\.\.)\]", path) or []
    ]
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = ".".join([*map(str, keys), missing[1]])
        return BadRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")
    while keys and keys[-1] is None:  # a value inside a dictionary: name the dictionary
        keys.pop()
    param = ".".join(map(str, keys)) or None
    return BadRequest(f"{param or 'body'}: {_readable(what)}{_value_at(data, keys)}.", param=param)


def _readable(what: str) -> str:
    """Turn `Expected `int | null`, got `str`` into `expected int, got str`; ranges keep their limit."""
    what = what.replace(" | null", "").replace("`", "")
    return what[:1].lower() + what[1:]


def _value_at(data: Json, keys: list) -> str:
    """Return the invalid value, if it is short."""
    for key in keys:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return ""
    if isinstance(data, (int, float)) or (isinstance(data, str) and len(data) <= 100):
        return f" (value: {data!r})"
    return ""


def _check_undeclared(members: _Members, value: msgspec.Struct, prefix: str, ignored: Ignored) -> None:
    """Refuse unsupported fields and note fields without effect, in `value` and in its nested Structs."""
    if len(members) > MAX_FIELDS:
        raise BadRequest(
            f"{prefix.rstrip('.') or 'The body'} has {len(members)} fields, which is more than {MAX_FIELDS}.",
            param=prefix.rstrip(".") or None,
        )
    rules = _rules(type(value))
    if idle := value.without_effect() if rules.may_be_idle else ():
        for path, kind in idle.items():
            ignored.record_hint(f"{prefix}{path} ({kind})" if kind else f"{prefix}{path}")
    for name, raw in members.items():
        path = f"{prefix}{name[:100]}"
        if name in rules.declared:
            child = getattr(value, rules.declared[name])
            if isinstance(child, msgspec.Struct):
                _check_undeclared(_members(raw), child, f"{path}.", ignored)
            elif isinstance(child, list):
                _check_items(raw, child, path, {one.removeprefix(f"{name}.") for one in idle} if idle else (), ignored)
        elif name in rules.unsupported:
            if not _neutral(raw, rules.unsupported[name]):
                raise BadRequest(f"{path} is not supported by this server.", param=path, code="unsupported_parameter")
        elif name in rules.hints:
            if not _neutral(raw, rules.hints[name]):
                ignored.record_hint(path)
        elif name not in rules.harmless and path not in EVERYWHERE:
            ignored.record_unknown(path)


class _Rules(NamedTuple):
    """The names of fields of a type, by their treatment."""

    declared: dict[str, str]  # field name -> attribute
    unsupported: dict[str, tuple]
    hints: dict[str, tuple]
    harmless: frozenset[str]
    may_be_idle: bool


@functools.cache
def _rules(cls: type[msgspec.Struct]) -> _Rules:
    classed = (getattr(cls, name, {}) for name in ("unsupported", "hints", "harmless"))
    declared = dict(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True))
    return _Rules(declared, *classed, hasattr(cls, "without_effect"))


def _check_items(raw: msgspec.Raw, items: list[Any], path: str, idle: Collection[str], ignored: Ignored) -> None:
    """Check the Structs in a list, except the `idle` ones."""
    if not any(issubclass(kind, msgspec.Struct) for kind in set(map(type, items))):
        return
    for i, (item_raw, item) in enumerate(zip(_items(raw), items, strict=True)):
        if is_left_out(item):
            ignored.record_unknown(f"{path}.{i} ({item.type})")
        elif isinstance(item, msgspec.Struct) and not (idle and str(i) in idle):  # a document may also be a text
            _check_undeclared(_members(item_raw), item, f"{path}.{i}.", ignored)


def _neutral(raw: msgspec.Raw, neutral: tuple) -> bool:
    if len(raw) > _NEUTRAL_BYTES:
        return False
    given = _untyped(raw)
    return given in neutral or bytes(raw) == b"null"
