"""Tools of a request -> the tools that the parsers look for, and the grammar that holds calls to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.server.parsers.harmony import HARMONY
from quire.server.parsers.tools import base
from quire.server.request.formats import Formats
from quire.server.request.tools import CUSTOM_PARAMETERS, Tool, ToolChoice
from quire.server.structured.structure import Structure
from quire.server.structured.text_grammar import LARK

_SPACE = {"type": "regex", "pattern": r"[ \n]{0,2}"}  # between thoughts and the text after them


def called_tools(tools: Sequence[Tool], choice: ToolChoice) -> tuple[base.Tool, ...]:
    """Return the tools that the answer may call."""
    if choice.mode == "none":
        return ()
    restricted = choice.names is not None and len(choice.names) < len(tools)
    return tuple(
        base.Tool(
            tool.name,
            _parameters(tool),
            strict=tool.strict or tool.grammar is not None or restricted,
            best_effort=not tool.strict and tool.grammar is None,
        )
        for tool in tools
        if choice.names is None or tool.name in choice.names
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    if not tool.custom:
        return tool.parameters or {"type": "object", "properties": {}}
    if tool.grammar is None:
        return CUSTOM_PARAMETERS
    syntax, definition = tool.grammar
    text = (
        {"type": "string", "pattern": f"^(?:{definition})$"}
        if syntax == "regex"
        else {"type": "string", LARK: definition}
    )
    return {**CUSTOM_PARAMETERS, "properties": {"input": text}, "additionalProperties": False}


def structure_of(
    tools: tuple[base.Tool, ...],
    choice: ToolChoice,
    content: Structure | None,
    formats: Formats,
    opened: bool,
    closed: bool,
) -> Structure | None:
    """Return the structure that the answer must match: calls as the choice wants them, and otherwise `content`.
    `opened`: the answer begins within thoughts; `closed`: the model will not think.
    """
    wanted = _calls_and_content(tools, choice, content, formats)
    covered = bool(tools) and formats.tools.covers_reasoning and wanted is not content
    if wanted is None or formats.reasoning is None or closed or covered:
        return wanted
    if opened or formats.reasoning is HARMONY:  # the text after the thoughts has a marker of its own
        after = list(formats.end) if len(formats.end) == 1 else formats.reasoning.end
        return msgspec.structs.replace(wanted, after=after)
    return _structural_tag(_after_optional_thoughts(_format_of(wanted), formats), wanted)  # the model may think, or not


def _calls_and_content(
    tools: tuple[base.Tool, ...], choice: ToolChoice, content: Structure | None, formats: Formats
) -> Structure | None:
    if not tools:
        return content
    required = choice.mode == "required"
    either = content is not None and not required
    tag = formats.tools.structure(tools, required=required or either, parallel=choice.parallel)
    if tag is None:
        return None
    if either:
        return _structural_tag({"type": "or", "elements": [_format_of(content), tag["format"]]}, content)
    return _structural_tag(tag["format"])


def _structural_tag(format: dict[str, Any], like: Structure | None = None) -> Structure:
    """Return a structural tag, with the field and white space of the structure `like`."""
    value = {"type": "structural_tag", "format": format}
    if like is None:
        return Structure(kind="structural_tag", value=value, param="tools")
    return msgspec.structs.replace(like, kind="structural_tag", value=value)


def _after_optional_thoughts(format: dict[str, Any], formats: Formats) -> dict[str, Any]:
    thoughts = base.tag(formats.reasoning.begin, {"type": "any_text"}, formats.reasoning.end)
    return base.sequence({"type": "optional", "content": base.sequence(thoughts, _SPACE)}, format)


def _format_of(content: Structure) -> dict[str, Any]:
    """Return the structure as a part of a structural tag."""
    match content.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": content.value}
        case "json_object":
            return base.json_schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": content.value}
        case "choice":
            return {"type": "or", "elements": [base.text(value) for value in content.value]}
        case "grammar":
            return {"type": "grammar", "grammar": content.value}
        case _:
            return content.value.get("format", content.value)
