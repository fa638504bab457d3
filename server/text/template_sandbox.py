"""The Jinja environment of chat templates: the same functions as in transformers, within limits of CPU time and of the
size of every value, because a template is an untrusted program.

Every iteration of a loop, every call and every filter checks the clock, so a template cannot compute for long
unnoticed. Work that C code does in one call (repeat, pad, replace, format) is refused before it begins if the result
would be large.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

MAX_CHARS = 2**24  # per value
MAX_ITEMS = 2**20  # per list that a template makes by repetition
_MAX_WIDTH = 2**16  # characters to which a text is padded or wrapped, digits of a number
_MAX_BITS = 2**16  # per integer
_MAX_INDENT = 64  # characters, per level of JSON
_NUMBER = re.compile(r"\d+")
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


class Limit(ValueError):
    """A template exceeded a limit."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training masks.

    Renders its body in a new scope.
    """

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller):
        return caller()


class _PlainDict:
    """Provides `dict(...)` and `dict.fromkeys(...)` without access to the class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that rejects names with a leading underscore, which would allow a sandbox escape."""

    def __init__(*args, **kwargs):  # no parameter named self, because `namespace(self=...)` is legal
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not start with an underscore: {name!r}")


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, spec: str) -> str:
        _check_widths(spec)
        return super().format_field(value, spec)


class _EscapeFormatter(SandboxedEscapeFormatter):
    def format_field(self, value: Any, spec: str) -> str:
        _check_widths(spec)
        return super().format_field(value, spec)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. `within(seconds, function)` bounds the templates that `function` renders in this thread."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, tojson: Callable[..., str]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self._clock = threading.local()
        self.filters["tojson"] = tojson
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.globals.update(dict=_PlainDict(), namespace=_Namespace)
        del self.globals["lipsum"]  # unlimited text

    def within(self, seconds: float, function: Callable[[], str], *, trace: bool = False) -> str:
        """Return the result of `function`. Raises Limit after `seconds` of this thread's CPU time. `trace` looks at the
        clock at every line of Python as well, also within filters, which multiplies the run time.
        """
        before = getattr(self._clock, "end", None)
        self._clock.end = end = time.thread_time() + seconds
        self._clock.seconds = seconds

        def on_line(frame, event, argument):
            if time.thread_time() > end:
                self.tick()
            return on_line

        outer = sys.gettrace()
        if trace:
            sys.settrace(on_line)
        try:
            return function()
        finally:
            if trace:
                sys.settrace(outer)
            self._clock.end = before

    def tick(self) -> None:
        """Raise Limit if the time of this thread's template is over."""
        end = getattr(self._clock, "end", None)
        if end is not None and time.thread_time() > end:
            raise Limit(f"the chat template computes for more than {self._clock.seconds:g} seconds")

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        for joined in list(tree.find_all(nodes.Concat)):
            check = nodes.EnvironmentAttribute("checked")
            joined.nodes = [
                one if isinstance(one, nodes.Const) else nodes.Call(check, [one], [], None, None).set_lineno(one.lineno)
                for one in joined.nodes
            ]
        tree.set_environment(self)
        return tree

    def checked(self, value: Any) -> Any:
        """Return `value`, an operand of `~`. Raises SecurityError if it is too long to be joined."""
        _check_size(len(value) if isinstance(value, str) else 0)
        return value

    def call(__self, __context, __obj, *args, **kwargs):
        __self.tick()
        estimate = _METHODS.get(getattr(__obj, "__name__", ""))
        if estimate is not None and isinstance(owner := getattr(__obj, "__self__", None), (str, bytes, int)):
            args = [list(arg) if hasattr(arg, "__next__") else arg for arg in args]
            _check_size(estimate(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, (str, bytes)):
                _check_conversions(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (operator == "**" and bits * right > _MAX_BITS) or (
                operator == "*" and bits + right.bit_length() > _MAX_BITS
            ):
                raise SecurityError("a power or product is too large")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                    _check_size(len(one) * other, MAX_CHARS if isinstance(one, (str, bytes)) else MAX_ITEMS)
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return functools.update_wrapper(formatted, value)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks the clock and the size of its result before it runs."""
        estimate = _FILTERS.get(name)
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if estimate is not None:
                args = [list(arg) if hasattr(arg, "__next__") else arg for arg in args]
                _check_size(estimate(*args[first:], **kwargs))
            return function(*args, **kwargs)

        return limited


# ---- sizes of results: estimates take the arguments of the method or filter


def _check_size(size: int, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise SecurityError(f"a value would have {size} characters or items, and the limit is {limit}")


def _check_widths(spec: str) -> None:
    if any(len(number) > 6 or int(number) > _MAX_WIDTH for number in _NUMBER.findall(spec)):
        raise SecurityError(f"a format has a width of more than {_MAX_WIDTH}")


def _check_conversions(text: str | bytes, values: Any) -> None:
    """Check the widths and precisions of `text % values`."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    for numbers in _CONVERSION.findall(text):
        for number in numbers:
            if number == "*":
                _check_numbers(*(values if isinstance(values, tuple) else (values,)))
            elif number:
                _check_widths(number)


def _check_numbers(*values: Any, **named: Any) -> int:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in (*values, *named.values())):
        raise SecurityError(f"a width or number is larger than {_MAX_WIDTH}")
    return 0


def _size_checked(text: Any, *values: Any, **named: Any) -> int:
    return _check_numbers(*values, **named)


def _size_replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + (text.count(old) * len(new) if len(new) > len(old) else 0)


def _size_joined(separator: Any, parts: Any = (), *_: Any) -> int:
    sizes = [len(part) if isinstance(part, (str, bytes)) else 0 for part in parts]
    return sum(sizes) + len(separator) * len(sizes)


def _size_joined_by_filter(parts: Any, d: Any = "", attribute: Any = None) -> int:
    return _size_joined(str(d), parts if isinstance(parts, (list, tuple, str)) else ())


def _size_expanded(text: Any, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t" if isinstance(text, str) else b"\t") * int(tabsize)


def _size_translated(text: Any, table: Any = (), *_: Any, **__: Any) -> int:
    values = table.values() if isinstance(table, dict) else table
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _size_in_bytes(number: Any, length: Any = 1, *_: Any, **__: Any) -> int:
    return int(length)


def _size_indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    _check_numbers(width)
    return len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _size_wrapped(text: Any, *values: Any, **named: Any) -> int:
    _check_numbers(*values, **named)
    longest = max((len(value) for value in (*values, *named.values()) if isinstance(value, str)), default=1)
    return len(text) * max(longest, 1)


def _size_formatted(text: Any, *values: Any, **named: Any) -> int:
    _check_conversions(str(text), values)
    return 0


def _size_as_json(value: Any, *values: Any, **named: Any) -> int:
    for one in (*values, *named.values()):
        for part in one if isinstance(one, (list, tuple)) else (one,):
            if (part if isinstance(part, int) else len(part) if isinstance(part, str) else 0) > _MAX_INDENT:
                raise SecurityError(f"an indent or separator has more than {_MAX_INDENT} characters")
    return 0


_PADDED = dict.fromkeys(("ljust", "rjust", "center", "zfill"), _size_checked)
_METHODS: dict[str, Callable[..., int]] = _PADDED | {
    "replace": _size_replaced,
    "join": _size_joined,
    "expandtabs": _size_expanded,
    "translate": _size_translated,
    "to_bytes": _size_in_bytes,
}
_BY_NUMBERS = dict.fromkeys(("center", "batch", "slice", "round", "truncate"), _size_checked)
_FILTERS: dict[str, Callable[..., int]] = _BY_NUMBERS | {
    "replace": _size_replaced,
    "join": _size_joined_by_filter,
    "indent": _size_indented,
    "wordwrap": _size_wrapped,
    "format": _size_formatted,
    "tojson": _size_as_json,
}
