"""Parameters of a tool call in the XML-like forms of some models: a schema of an object -> one element per property.

Texts are written as they are, other values as JSON.
"""

from __future__ import annotations

from typing import Any

from quire.server.structured.lark import ANY_TEXT, Builder, StructureError, quoted
from quire.server.structured.object_shapes import PLAIN, Shape, shapes
from quire.server.structured.schema.keywords import SchemaError, check
from quire.server.structured.schema.schema_algebra import types_of
from quire.server.structured.text_grammar import before_tag, lark_of
from quire.server.structured.written_values import (
    VALIDATING,
    alternatives,
    beginning,
    constants,
    is_text,
    may_be_text,
    plain_terminal,
    terminal_of_texts,
)
from quire.server.values import Json

# style -> the text before a value, with the property's name and whether it is plain text; the text after it
_FORMS = {
    "qwen_xml": ("<parameter={name}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{name}">', "</parameter>"),
    "glm_xml": ("<arg_key>{name}</arg_key>", "</arg_value>"),
    "deepseek_xml": ('<｜DSML｜parameter name="{name}" string="{text}">', "</｜DSML｜parameter>"),
}
_SPACE = r"/[ \t\r\n]{0,8}/"


def parameters(schema: Json, style: str, path: str, builder: Builder) -> str:
    """Return an expression for the properties of `schema`, in its order. Raises StructureError.

    Only listed properties are possible; a schema that lists none allows any, unless it forbids them.
    """
    try:
        check(schema)
    except SchemaError as error:
        raise StructureError(f"{path} {error}") from None
    if not isinstance(schema, dict) or "object" not in types_of(schema):
        raise StructureError(f"{path} at #: type: the parameters of a call are an object")
    required = schema.get("required", [])
    if schema.keys() & VALIDATING <= PLAIN:
        shape = Shape(
            schema.get("properties", {}), frozenset(required), schema.get("additionalProperties", True) is False
        )
        if not shape.is_possible():
            raise StructureError(f"{path} at #: no value is valid")
        return _elements_of(shape, _definitions(schema), style, path, builder)
    found, definitions = shapes(schema, path, builder.close)
    return f"({' | '.join(_elements_of(shape, definitions, style, path, builder) for shape in found)})"


def _elements_of(shape: Shape, definitions: dict[str, Any], style: str, path: str, builder: Builder) -> str:
    space = builder.terminal(_SPACE)
    if not shape.properties and not shape.lists_all and not shape.required:
        return f"({space} {_any_element(style, path, builder)})* {space}"
    parts = []
    for name, child in shape.all_named():
        if child is False:
            continue
        whole = {**child, **definitions} if isinstance(child, dict) else child
        one = builder.rule(f"{space} {_element(name, whole, style, f'{path}.properties.{name}', builder)}")
        parts.append(one if name in shape.required else f"{one}?")
    return " ".join([*parts, space])


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}


def _any_element(style: str, path: str, builder: Builder) -> str:
    """Return an element of any name, with any text."""
    before, after = _FORMS[style]
    head, rest = before.split("{name}")
    rests = " | ".join(builder.literal(text) for text in sorted({rest.format(text=flag) for flag in ("true", "false")}))
    name = builder.terminal(r'/[^"<>\s]{1,128}/')
    return f"{builder.literal(head)} {name} ({rests}) {_value_tag(style, builder)} {_text(after, path, builder)}"


def _value_tag(style: str, builder: Builder) -> str:
    return f"{builder.terminal(_SPACE)} {builder.literal('<arg_value>')}" if style == "glm_xml" else ""


def _text(after: str, path: str, builder: Builder, body: str = ANY_TEXT) -> str:
    """Return a text of the terminal `body` up to and including `after`."""
    pieces = builder.pieces(after)
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return builder.rule(builder.terminal(body), f"[suffix={quoted(after)}]")
    if isinstance(pieces[0], int):
        return f"{builder.terminal(body)} {builder.literal(after)}"
    raise StructureError(f"{path}: this vocabulary cannot end a text at {after!r}")


def _element(name: str, schema: Json, style: str, path: str, builder: Builder) -> str:
    after = _FORMS[style][1]
    found = list(alternatives(schema, schema, path))
    if style != "deepseek_xml" and any(one is True or one == {} for one in found):
        return f"{_opening(name, style, 'true', builder)} {_text(after, path, builder)}"
    texts = [one for one in found if is_text(one)]
    others = [one for one in found if not is_text(one)]
    if style != "deepseek_xml" and any(map(may_be_text, others)):
        raise StructureError(
            f"{path}: without one type, it cannot be told from a string in this model's format of calls"
        )
    if not texts:
        return f"{_opening(name, style, 'false', builder)} {_json([schema], schema, path, after, builder)}"
    opening = _opening(name, style, "true", builder)
    if (grammar := lark_of(schema)) is not None:
        text = builder.text_grammar(grammar, before_tag, f"{path} ")
        newlines = (r'"\n"', r'"\n"?') if style == "qwen_xml" else ("", "")  # which its parser takes for the tags'
        return f"{opening} {newlines[0]} {text} {newlines[1]} {builder.literal(after)}"
    bodies = [_terminal(text, path, builder) for text in texts]
    if style == "deepseek_xml":  # the tag says whether the value is a string
        as_text = f"{opening} {_texts(bodies, style, path, builder)}"
        if not others:
            return as_text
        as_json = _json(others, schema, path, after, builder)
        return f"({as_text} | {_opening(name, style, 'false', builder)} {as_json})"
    terminals = [plain_terminal(one) for one in others]
    bodies += filter(None, terminals)
    others = [one for one, terminal in zip(others, terminals) if terminal is None]
    if not others:
        return f"{opening} {_texts(bodies, style, path, builder)}"
    # the first character tells a text from JSON
    begins = sorted({beginning(one, path) for one in others})
    bodies = [" & ".join([f"({body})", *(f"~({begin})" for begin in begins)]) for body in bodies]
    return f"{opening} ({_texts(bodies, style, path, builder)} | {_json(others, schema, path, after, builder)})"


def _opening(name: str, style: str, flag: str, builder: Builder) -> str:
    """Return the text before a value; `flag`: whether the value is a text, for formats that state it."""
    return f"{builder.literal(_FORMS[style][0].format(name=name, text=flag))} {_value_tag(style, builder)}"


def _texts(bodies: list[str], style: str, path: str, builder: Builder) -> str:
    """Return a text of one of the terminals, including its end marker."""
    after = _FORMS[style][1]
    if ANY_TEXT in bodies:
        return _text(after, path, builder)
    body = " | ".join(f"({body})" for body in bodies)
    if style != "qwen_xml":
        return _text(after, path, builder, body)
    return f'"\\n" {_text(chr(10) + after, path, builder, body)}'  # its parser takes newlines for the tags'


def _terminal(schema: dict[str, Any], path: str, builder: Builder) -> str:
    for value in constants(schema) or ():
        if any(isinstance(piece, int) for piece in builder.pieces(value)):
            raise StructureError(f"{path}: enum: {value[:50]!r} has the text of a special token")
    return terminal_of_texts(schema, path)


def _json(schemas: list[Any], root: Json, path: str, after: str, builder: Builder) -> str:
    """Return JSON for one of the schemas, whose definitions are in `root`, including its end marker."""
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if isinstance(root, dict) and isinstance(whole, dict):
        whole = {**whole, **_definitions(root)}
    space = builder.terminal(_SPACE)
    return f"{space} {builder.json(whole, f'{path} ')} {space} {builder.literal(after)}"
