"""Rewrites the terminals of a Lark grammar whose text is written in a JSON string or before an end tag.

A schema has such a grammar under `LARK`; it comes from a custom tool, whose text is a string of the call's arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.server.structured.schema.escaped_pattern import IN_JSON, PatternError, Writing, written, written_text
from quire.server.values import Json

LARK = "x-quire-lark"  # the keyword of a schema

# text before an end tag: a terminal of a regular expression ends where the tag begins
BEFORE_TAG: Writing = {"<": None}
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    | (?P<range>"(?:\\.|[^"\\\n])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])*")
    | (?P<text>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<import>%import[ \t]+common[ \t]*
        (?:\.[ \t]*(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\((?P<several>[^)\n]*)\)))
    | (?P<ignore>%ignore\b)
    | (?P<count>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    | (?P<options>(?<![^\n])[ \t]*[!?]?\w[\w-]*[ \t]*\[)
    | (?P<refused>%\w*|~|<[^<>\s]+>|@[\w{-]*)
    """,
    re.VERBOSE,
)
# imports with characters that are rewritten -> their pattern in Lark's library
_COMMON = {
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
}


def in_json(grammar: str) -> str:
    """Return the grammar of the inside of a JSON string whose value matches `grammar`. Raises PatternError."""
    return _rewritten(grammar, IN_JSON)


def before_tag(grammar: str) -> str:
    """Return the grammar of a text that an end tag follows: its regular expressions do not match `<`. Raises
    PatternError.
    """
    return _rewritten(grammar, BEFORE_TAG)


def lark_of(schema: Json) -> str | None:
    """Return the grammar of a schema of a string that has one."""
    found = schema.get(LARK) if isinstance(schema, Mapping) and schema.get("type") == "string" else None
    return found if isinstance(found, str) else None


def lark_of_input(schema: Json) -> str | None:
    """Return the grammar of the text `input` of a custom tool's arguments."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return lark_of(properties.get("input")) if isinstance(properties, Mapping) else None


def _rewritten(grammar: str, writing: Writing) -> str:
    def one(match: re.Match[str]) -> str:
        token = match[0]
        try:
            return _token(match, writing)
        except PatternError as error:
            raise PatternError(f"{token[:50]}: {error}") from None

    return _TOKEN.sub(one, grammar)


def _token(match: re.Match[str], writing: Writing) -> str:
    token = match[0]
    match match.lastgroup if match["import"] is None else "import":
        case "text":
            text = _value(token.removesuffix("i"))
            if token.endswith("i"):
                return f"/{written_text(text, writing, True)}/" if text else '""'
            return json.dumps("".join(writing.get(char) or char for char in text), ensure_ascii=False)
        case "range":
            low, high = (_value(text) for text in re.findall(r'"(?:\\.|[^"\\])*"', token))
            if len(low) != 1 or len(high) != 1:
                raise PatternError("a range goes from one character to another")
            bounds = "-".join(f"\\U{ord(char):08x}" for char in (low, high))
            return f"/{written(f'[{bounds}]', '', writing)}/"
        case "regex":
            end = token.rindex("/")
            return f"/{written(token[1:end], token[end + 1 :], writing)}/"
        case "import":
            return _imports(match, writing)
        case "refused" | "options":
            raise PatternError("not supported in the grammar of a tool")
        case _:
            return token


def _imports(match: re.Match[str], writing: Writing) -> str:
    names = [match["one"]] if match["one"] else [name.strip() for name in match["several"].split(",")]
    lines = []
    for name in names:
        alias = match["alias"] or name
        pattern = _COMMON.get(name)
        renamed = f" -> {alias}" if alias != name else ""
        lines.append(
            f"%import common.{name}{renamed}" if pattern is None else f"{alias}: /{written(pattern, '', writing)}/"
        )
    return "\n".join(lines)


def _value(literal: str) -> str:
    try:
        return json.loads(literal)
    except ValueError as error:
        raise PatternError(f"not a string of JSON: {error}") from None
