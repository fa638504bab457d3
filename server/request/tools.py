"""Tools and thinking of a request, in no dialect's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.server.errors import BadRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def custom_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call of a custom tool with this text."""
    return {"input": text}


@dataclass(slots=True, frozen=True)
class Tool:
    """A tool that the model may call: a function whose arguments are a JSON object, or, if `custom`, one that takes a
    text.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema of the arguments; None: an object without properties
    strict: bool = False  # the arguments are valid against `parameters`
    custom: bool = False
    grammar: tuple[Literal["lark", "regex"], str] | None = None  # for a custom tool's text

    def for_template(self) -> dict[str, Any]:
        """Return the tool as templates expect it. They know functions only: a custom tool is one with a text as
        `input`.
        """
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.custom:
            function["parameters"] = CUSTOM_PARAMETERS
        elif self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


def require_object(parameters: dict[str, Any] | None, path: str) -> None:
    """Raise BadRequest for a schema of arguments that no object fits."""
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadRequest(
            f"{path}.type: the arguments of a function are an object, so the type must be 'object', not {kind!r:.100}.",
            param=f"{path}.type",
        )


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """The calls that an answer may have. `names` are the only tools it may call, None: all."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    parallel: bool = True  # more than one call per answer


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Settings for thoughts before the answer. None: the default of the model's template.

    effort: how much, a word of `EFFORTS`. budget: the largest number of tokens that it may think. enabled: whether it
    thinks at all. separate: tell reasoning from content; False leaves all text as it is. stream: reasoning comes in
    pieces; False gives it whole once it has ended. enabled_param: the request's field that sets `enabled`.
    """

    effort: str | None = None
    budget: int | None = None
    enabled: bool | None = None
    separate: bool = True
    stream: bool = True
    enabled_param: str = "enable_thinking"
