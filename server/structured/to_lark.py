"""A `Structure` as one grammar of llguidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.structured.lark import ANY_TEXT, WHITESPACE, Builder, grammar_text, quoted
from quire.server.structured.structural_tag import expression
from quire.server.structured.structure import Structure
from quire.server.values import Json


def to_lark(
    structure: Structure,
    specials: Mapping[str, int],
    eos_ids: Sequence[int],
    schemas: list[tuple[str, Json]] | None = None,
) -> str:
    """Return the grammar; append its schemas, with their places, to `schemas`. Raises StructureError.

    Regular expressions and Lark texts are checked when the result is compiled.
    """
    options: dict[str, Any] = {"whitespace_flexible": False}
    if not structure.compact:
        options = {"whitespace_pattern": structure.whitespace or WHITESPACE}
    builder = Builder(specials, eos_ids, options, not structure.additional_properties)
    if schemas is not None:
        builder.schemas = schemas
    if structure.kind == "grammar" and not isinstance(structure.after, str):
        return grammar_text(structure.value, specials, eos_ids)
    start = _expression(structure, builder)
    if isinstance(structure.after, str):
        start = f"{_up_to(builder, structure.after)} {start}"
    return builder.text(start)


def _expression(structure: Structure, builder: Builder) -> str:
    value = structure.value
    match structure.kind:
        case "json_schema":
            return builder.json(value)
        case "json_object":
            return builder.json({"type": "object"})
        case "regex":
            return builder.regex(value)
        case "choice":
            return builder.choice(value)
        case "grammar":
            return builder.grammar(value)
        case "structural_tag":
            return expression(value, builder)


def _up_to(builder: Builder, end: str) -> str:
    """Return a rule for any text up to and including the first `end`."""
    pieces = builder.pieces(end)
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return builder.rule(ANY_TEXT, f"[suffix={quoted(end)}]")
    others = builder.other_specials([piece for piece in pieces if isinstance(piece, int)])
    text = builder.terminal(ANY_TEXT)
    free = f"({text} {others})* {text}" if others else text
    return builder.rule(f"{free} {builder.literal(end)}")
