"""The formats in which the served model thinks and calls tools, chosen once, when its tokenizer is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quire.configs.serving import ServerConfig
from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.registry import choose_reasoning, choose_tools, reasoning_format, tool_format
from quire.server.parsers.tools.base import ToolFormat
from quire.server.text.chat_template import compile_template
from quire.server.text.tokenizer import Tokenizer

GENERIC = "json"  # the parser of the generic tool prompt

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Formats:
    """The parsers of the model's text. `generic`: tools are described in a system message, because the template
    prints none, or because a setting says so. `marker_ids` are the parsers' markers that are tokens, `visible_ids` the
    special ones of them, which the parsers must see in the text. The last are token ids of what begins and ends
    thoughts, and of the texts that end them when their budget is used: before any answer, before one with a structure,
    and before calls whose structure covers the thoughts.
    """

    tools: ToolFormat | None = None
    tools_reason: str = ""
    generic: bool = False
    reasoning: ReasoningFormat | None = None
    reasoning_reason: str = ""
    marker_ids: frozenset[int] = frozenset()
    visible_ids: frozenset[int] = frozenset()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    forced_end: tuple[int, ...] = ()
    forced_to_structure: tuple[int, ...] = ()
    forced_to_calls: tuple[int, ...] = ()

    def describe(self) -> dict[str, dict[str, str | None]]:
        """Return facts for /server_info."""
        return {
            "tool_call_parser": {"name": self.tools and self.tools.name, "reason": self.tools_reason},
            "reasoning_parser": {"name": self.reasoning and self.reasoning.name, "reason": self.reasoning_reason},
        }


def choose_formats(server: ServerConfig, tokenizer: Tokenizer) -> Formats:
    """Return the formats of the settings, else those that fit the chat template and the tokenizer. Raises ValueError
    for a setting.
    """
    template = "\n".join(tokenizer.chat_templates.values())
    tools, why_tools = _tools(server.tool_call_parser, template, tokenizer)
    generic, why_generic = _generic(server, tokenizer)
    if generic:
        tools, why_tools = tool_format(GENERIC), why_generic
    reasoning, why_reasoning = _reasoning(server.reasoning_parser, template, tokenizer)
    markers = {*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ())}
    ids = frozenset({tokenizer.token_to_id(marker) for marker in markers} - {None})
    formats = Formats(
        tools,
        why_tools,
        generic,
        reasoning,
        why_reasoning,
        ids,
        ids & tokenizer.special_ids,
        *(_marker_ids(reasoning, tokenizer) if reasoning else ()),
    )
    if server.enable_auto_tool_choice:
        logger.info("--enable-auto-tool-choice has no effect: a request with tools and no tool_choice has auto anyway")
    for what, chosen, why in (("tool-call", tools, why_tools), ("reasoning", reasoning, why_reasoning)):
        logger.info("%s parser: %s (%s)", what, chosen.name if chosen else "none", why)
    return formats


def _generic(server: ServerConfig, tokenizer: Tokenizer) -> tuple[bool, str]:
    """Return whether tools are described in a prompt of the server's own, and why. Raises ValueError for a setting."""
    # computes what the templates print now, not during the first request
    supports = [compile_template(source).tool_support for source in tokenizer.chat_templates.values()]
    if server.generic_tool_prompt:
        if server.tool_call_parser not in ("auto", GENERIC):
            raise ValueError(
                f"--generic-tool-prompt asks for calls that the parser {GENERIC!r} reads: leave out --tool-call-parser "
                f"{server.tool_call_parser}"
            )
        return True, "--generic-tool-prompt"
    automatic = server.generic_tool_prompt is None and server.tool_call_parser == "auto"
    if not automatic or not supports or any(support.tools for support in supports):
        return False, ""
    return True, (
        "the chat template prints no tools, so a system message describes them; --no-generic-tool-prompt refuses "
        "tools instead"
    )


def _has_token(tokenizer: Tokenizer):
    return lambda text: tokenizer.token_to_id(text) is not None


def _tools(name: str, template: str, tokenizer: Tokenizer) -> tuple[ToolFormat | None, str]:
    if name == "none":
        return None, "--tool-call-parser none"
    if name != "auto":
        return tool_format(name, template, _has_token(tokenizer)), f"--tool-call-parser {name}"
    return choose_tools(template, _has_token(tokenizer))


def _reasoning(name: str, template: str, tokenizer: Tokenizer) -> tuple[ReasoningFormat | None, str]:
    if name == "none":
        return None, "--reasoning-parser none"
    if name != "auto":
        return reasoning_format(name, template, _has_token(tokenizer)), f"--reasoning-parser {name}"
    return choose_reasoning(template, _has_token(tokenizer))


def _marker_ids(reasoning: ReasoningFormat, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the last fields of `Formats`.

    A marker without a token of its own is found by its ids but the last, which may have merged with the text after it.
    """
    forced = reasoning.forced_end or reasoning.end
    to_structure = forced[: forced.rindex(reasoning.end)] + reasoning.end if reasoning.end in forced else forced
    texts = forced, to_structure, reasoning.forced_to_calls or to_structure
    found = []
    for marker in (reasoning.begin, reasoning.end):
        ids = tokenizer.encode(marker, add_special_tokens=False)
        found.append(tuple(ids if len(ids) == 1 or ids[-1] in tokenizer.added_ids else ids[:-1]))
    return [*found, *(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)]
