"""The formats by name, and the choice of a format from a model's chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quire.server.parsers.harmony import HARMONY, HarmonyTools
from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.reasoning.think import THINK
from quire.server.parsers.tools.base import ToolFormat
from quire.server.parsers.tools.hermes import Hermes

F = TypeVar("F", ToolFormat, ReasoningFormat)
HasToken = Callable[[str], bool]

# The first format that recognizes a template is chosen: the more special ones come first.
TOOL_FORMATS: tuple[ToolFormat, ...] = (HarmonyTools(), Hermes())
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (HARMONY, THINK)

# vLLM's and SGLang's names of --tool-call-parser and --reasoning-parser that differ from ours
TOOL_ALIASES: Mapping[str, str] = {
    "openai": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
}
REASONING_ALIASES: Mapping[str, str] = {
    "openai_gptoss": "gpt_oss",
    "gpt-oss": "gpt_oss",
}


def tool_format(name: str) -> ToolFormat:
    """The tool format with this name or alias. Raises ValueError, which lists the names."""
    return _named(TOOL_FORMATS, TOOL_ALIASES, name, "tool-call")


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format with this name or alias. Raises ValueError, which lists the names."""
    return _named(REASONING_FORMATS, REASONING_ALIASES, name, "reasoning")


def choose_tools(template: str | None, has_token: HasToken) -> tuple[ToolFormat | None, str]:
    """The format in which this model writes calls, and why; None if its template knows no tools."""
    if not template:
        return None, "the model has no chat template"
    if "tools" not in template:
        return None, "the chat template does not use `tools`"
    return _chosen(TOOL_FORMATS, template, has_token, "the chat template writes calls in no known format")


def choose_reasoning(template: str | None, has_token: HasToken) -> tuple[ReasoningFormat | None, str]:
    """The format in which this model writes its thoughts, and why; None if its template knows no thoughts."""
    if not template:
        return None, "the model has no chat template"
    return _chosen(REASONING_FORMATS, template, has_token, "the chat template has no markers of thoughts")


def _chosen(formats: Sequence[F], template: str, has_token: HasToken, otherwise: str) -> tuple[F | None, str]:
    for candidate in formats:
        why = candidate.recognize(template, has_token)
        if why is not None:
            return candidate, why
    return None, otherwise


def _named(formats: Sequence[F], aliases: Mapping[str, str], name: str, kind: str) -> F:
    wanted = aliases.get(name, name)
    for candidate in formats:
        if candidate.name == wanted:
            return candidate
    names = sorted({candidate.name for candidate in formats} | set(aliases))
    raise ValueError(f"there is no {kind} parser {name!r}; choose one of: {', '.join(names)}")
