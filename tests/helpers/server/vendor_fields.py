"""Makes bodies with one field, at any depth, and the required ones, from the request types of vendors' packages."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any, NotRequired, Required

from pydantic import BaseModel
from typing_extensions import is_typeddict

MAX_DEPTH = 6  # of fields; schemas nest without an end
_SCALARS = {int: 1, float: 0.5, bool: True} | dict.fromkeys((str, bytes, object, Any, IO[bytes], PathLike, Path), "x")


def fields_of(model: type) -> dict[str, tuple[Any, bool]]:
    """Return name -> (type, whether it is required) of a TypedDict or a pydantic model."""
    if is_typeddict(model):
        hints = typing.get_type_hints(model, include_extras=True)  # __required_keys__ misses postponed annotations
        return {
            name: (hint, (Required if model.__total__ else typing.get_origin(hint)) is Required)
            for name, hint in hints.items()
        }
    return {name: (field.annotation, field.is_required()) for name, field in model.model_fields.items()}


def bodies(model: type, given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted name of the field, body). `given` has the required fields, and values instead of made-up ones."""
    base = minimal(model) | given
    for name, (hint, _) in fields_of(model).items():
        for path, value in _values(hint, 1):
            yield f"{name}{path}", base | {name: value}


def minimal(hint: Any) -> Any:
    """Return the smallest value of a type."""
    if is_object(hint):
        return {name: minimal(one) for name, (one, required) in fields_of(hint).items() if required}
    return next(iter(_values(hint, MAX_DEPTH)), ("", None))[1]


def is_object(hint: Any) -> bool:
    return is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel))


def _values(hint: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (path below the field, value) for every field of every alternative of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        yield "", _SCALARS[hint]
    elif origin in (typing.Annotated, Required, NotRequired):
        yield from _values(arguments[0], depth)
    elif origin in (typing.Union, types.UnionType):
        for one in arguments:
            if one is not type(None):
                yield from _values(one, depth)
    elif origin is typing.Literal:
        yield from (("", value) for value in arguments)
    elif origin in (dict, collections.abc.Mapping):
        yield from (("", {"x": value}) for _, value in _values(arguments[1], MAX_DEPTH))
    elif origin is not None and issubclass(origin, collections.abc.Iterable):
        yield from ((path, [value]) for path, value in _values(arguments[0], depth))
    elif is_object(hint):
        base = minimal(hint)
        yield "", base
        if depth < MAX_DEPTH:
            for name, (one, _) in fields_of(hint).items():
                yield from ((f".{name}{path}", base | {name: value}) for path, value in _values(one, depth + 1))
    else:
        raise TypeError(f"no value of {hint} is known")
