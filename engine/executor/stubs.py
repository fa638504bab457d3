"""Typed calls to another process: a protocol's methods on this side, the same methods of an object on the other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


@functools.cache
def method_names(protocol: type) -> tuple[str, ...]:
    """Return the methods that a protocol declares."""
    return tuple(name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_")


def stub(protocol: type[T], send: Callable[..., Any]) -> T:
    """Return an object with the methods of `protocol`. Each converts `send(name, *args)` to its declared result type,
    because msgpack turns tuples and structs into lists.
    """
    methods = {name: _method(getattr(protocol, name), send) for name in method_names(protocol)}
    return type(f"{protocol.__name__}Stub", (), methods)()


def _method(declared: Callable[..., Any], send: Callable[..., Any]) -> Callable[..., Any]:
    result = get_type_hints(declared)["return"]

    @functools.wraps(declared)
    def method(self: object, *args: Any) -> Any:
        return msgspec.convert(send(declared.__name__, *args), result)

    return method


def answer(protocol: type[T], target: T, name: str, args: list) -> Any:
    """Call the method of `target` that a stub of `protocol` named. Raises ValueError for a name it does not declare."""
    if name not in method_names(protocol):
        raise ValueError(f"unknown method {name!r}: use one of {', '.join(method_names(protocol))}")
    return getattr(target, name)(*args)
