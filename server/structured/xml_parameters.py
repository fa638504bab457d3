"""Parameters of a tool call in the XML-like forms of some models: a schema of an object -> one element per property.

Texts are written as they are, other values as JSON.
"""

from __future__ import annotations

from typing import Any

from quire.server.structured.lark import ANY_TEXT, Builder, StructureError, quoted
from quire.server.structured.text_grammar import before_tag, lark_of

# style -> what comes before a value, with the property's name and whether the value is a plain text; and after it
_FORMS = {
    "qwen_xml": ("<parameter={name}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{name}">', "</parameter>"),
    "glm_xml": ("<arg_key>{name}</arg_key>", "</arg_value>"),
    "deepseek_xml": ('<｜DSML｜parameter name="{name}" string="{text}">', "</｜DSML｜parameter>"),
}
_SPACE = r"/[ \t\r\n]{0,8}/"


def parameters(schema: Any, style: str, path: str, builder: Builder) -> str:
    """An expression for the properties of `schema`, in its order. Raises StructureError.

    Properties beside those that it lists are not possible; a schema that lists none allows any, unless it says not.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        raise StructureError(f"{path}: parameters need the schema of an object")
    required = schema.get("required", [])
    space = builder.terminal(_SPACE)
    if not schema.get("properties") and schema.get("additionalProperties", True) is not False and not required:
        return f"({space} {_any_element(style, path, builder)})* {space}"
    parts = []
    for name, child in schema.get("properties", {}).items():
        whole = {**child, **_definitions(schema)} if isinstance(child, dict) else child
        one = builder.rule(f"{space} {_element(name, whole, style, f'{path}.properties.{name}', builder)}")
        parts.append(one if name in required else f"{one}?")
    return " ".join([*parts, space])


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}


def _any_element(style: str, path: str, builder: Builder) -> str:
    """An element of any name, with any text."""
    before, after = _FORMS[style]
    head, rest = before.split("{name}")
    rests = " | ".join(builder.literal(text) for text in sorted({rest.format(text=flag) for flag in ("true", "false")}))
    name = builder.terminal(r'/[^"<>\s]{1,128}/')
    return f"{builder.literal(head)} {name} ({rests}) {_value_tag(style, builder)} {_text(after, path, builder)}"


def _value_tag(style: str, builder: Builder) -> str:
    return f"{builder.terminal(_SPACE)} {builder.literal('<arg_value>')}" if style == "glm_xml" else ""


def _text(after: str, path: str, builder: Builder) -> str:
    """Any text up to and with `after`."""
    pieces = builder.pieces(after)
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return builder.rule(ANY_TEXT, f"[suffix={quoted(after)}]")
    if isinstance(pieces[0], int):
        return f"{builder.terminal(ANY_TEXT)} {builder.literal(after)}"
    raise StructureError(f"{path}: this vocabulary cannot end a text at {after!r}")


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether the parsers take the value for a text, as it is."""
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _element(name: str, schema: Any, style: str, path: str, builder: Builder) -> str:
    before, after = _FORMS[style]
    is_text = isinstance(schema, dict) and _is_text(schema)
    opening = builder.literal(before.format(name=name, text="true" if is_text else "false"))
    opening = f"{opening} {_value_tag(style, builder)}"
    if not is_text:
        space = builder.terminal(_SPACE)
        return f"{opening} {space} {builder.json(schema, f'{path} ')} {space} {builder.literal(after)}"
    if (grammar := lark_of(schema)) is not None:
        text = builder.text_grammar(grammar, before_tag, f"{path} ")
        newlines = (r'"\n"', r'"\n"?') if style == "qwen_xml" else ("", "")  # which its parser takes for the tags'
        return f"{opening} {newlines[0]} {text} {newlines[1]} {builder.literal(after)}"
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        choices = " | ".join(builder.literal(value) for value in values if isinstance(value, str))
        if not choices:
            raise StructureError(f"{path}: enum: no value is a string")
        space = builder.terminal(_SPACE)
        return f"{opening} {space} ({choices}) {space} {builder.literal(after)}"
    return f"{opening} {_text(after, path, builder)}"
