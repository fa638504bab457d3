"""Ollama's Modelfile: text -> `Entry`, with base and adapters as written in the text, and back."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.checkpoints.library.entries import Entry

_COMMANDS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "MESSAGE", "LICENSE")
_SHOWN_ONLY = ("RENDERER", "PARSER", "REQUIRES")  # for newer releases; quire reads the model's own template instead
_ROLES = ("system", "user", "assistant")
_QUOTES = '"""'
MAX_CHARS = 1 << 20
MAX_LINES = 20_000


def read_bytes(data: bytes) -> str:
    """Return the text of a Modelfile in UTF-8, or in UTF-16 as PowerShell writes it. Raises ValueError."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"the Modelfile is not UTF-8 text (byte {error.start})") from None


def parse(text: str) -> Entry:
    """Return the entry of a Modelfile. Raises ValueError with the line if it cannot be read."""
    if len(text) > MAX_CHARS or text.count("\n") > MAX_LINES:
        raise ValueError(f"a Modelfile has at most {MAX_CHARS} characters and {MAX_LINES} lines")
    base, texts, parameters = "", {"SYSTEM": "", "TEMPLATE": ""}, {}
    adapters: list[str] = []
    messages: list[dict[str, str]] = []
    licenses: list[str] = []
    for number, command, value in _commands(text.splitlines()):
        try:
            match command:
                case "FROM" if base:
                    raise ValueError("FROM is given twice")
                case "FROM":
                    base = value
                case "SYSTEM" | "TEMPLATE":
                    texts[command] = value
                case "ADAPTER":
                    adapters.append(value)
                case "LICENSE":
                    licenses.append(value)
                case "MESSAGE":
                    messages.append(_message(value))
                case "PARAMETER":
                    _add_parameter(parameters, value)
        except ValueError as error:
            raise ValueError(f"line {number} of the Modelfile: {error}") from None
    if not base:
        raise ValueError("the Modelfile has no FROM, which names the model that it is made from")
    return Entry(
        base, texts["SYSTEM"], texts["TEMPLATE"], parameters, tuple(adapters), tuple(messages), tuple(licenses)
    )


def _commands(lines: list[str]) -> list[tuple[int, str, str]]:
    """Return (line, command, value) of each command. Raises ValueError with the line."""
    found, position = [], 0
    while position < len(lines):
        number, line = position + 1, lines[position].strip()
        position += 1
        if not line or line.startswith("#"):
            continue
        word, rest = [*line.split(None, 1), ""][:2]
        command = word.upper()
        if command not in _COMMANDS + _SHOWN_ONLY:
            raise ValueError(
                f"line {number} of the Modelfile: {word[:40]!r} is no command; there are {', '.join(_COMMANDS)}"
            )
        prefix, quote, first_line = rest.partition(_QUOTES)
        role = prefix.strip().lower() if command == "MESSAGE" else ""
        if quote and (not prefix.strip() or role in _ROLES):
            value, position = _quoted(first_line, lines, position, number)
            value = f"{role} {value}" if role else value
        else:
            value, position = _one_quote(rest.strip(), lines, position)
        if not value.strip():
            raise ValueError(f"line {number} of the Modelfile: {command} has no value")
        found.append((number, command, value))
    return found


def _quoted(first_line: str, lines: list[str], position: int, number: int) -> tuple[str, int]:
    """Return the text up to the next quotation marks, which starts with `first_line`, and the position after it."""
    parts = [first_line]
    while _QUOTES not in parts[-1]:
        if position == len(lines):
            raise ValueError(f"line {number} of the Modelfile: three quotation marks are not closed")
        parts.append(lines[position])
        position += 1
    parts[-1], _, after = parts[-1].partition(_QUOTES)
    if after.strip():
        raise ValueError(f"line {position} of the Modelfile: there is text after three quotation marks")
    return "\n".join(parts), position


def _one_quote(text: str, lines: list[str], position: int) -> tuple[str, int]:
    """Return a value without the quotation marks around it, which may span lines, and the position after it."""
    if not text.startswith('"') or (len(text) > 1 and text.endswith('"')):
        return _unquoted(text), position
    end = next((i for i in range(position, len(lines)) if lines[i].rstrip().endswith('"')), None)
    if end is None:
        return text, position
    return _unquoted("\n".join([text, *lines[position:end], lines[end].rstrip()])), end + 1


def _unquoted(text: str) -> str:
    """Return a value of one line without the quotation marks around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _message(value: str) -> dict[str, str]:
    role, _, content = value.partition(" ")
    if role.lower() not in _ROLES or not content.strip():
        raise ValueError(f"MESSAGE needs a role of {', '.join(_ROLES)} and a text")
    return {"role": role.lower(), "content": _unquoted(content.strip())}


def _add_parameter(parameters: dict[str, Any], value: str) -> None:
    name, _, text = re.sub(r"\s+", " ", value, count=1).partition(" ")
    name, text = name.lower(), _unquoted(text.strip())
    if not text:
        raise ValueError(f"PARAMETER {name[:40]} has no value")
    if name == "stop":  # each names one text
        parameters.setdefault("stop", []).append(text)
    else:
        parameters[name] = _number(text)


def _number(text: str) -> Any:
    """Return a number or boolean as such, and other text unchanged."""
    try:
        found = json.loads(text.lower())
    except ValueError:
        return text
    return found if isinstance(found, (int, float)) else text


def render(entry: Entry) -> str:
    """Return the Modelfile that makes `entry`."""
    lines = [f"FROM {entry.base}", *(f"ADAPTER {path}" for path in entry.adapters)]
    lines += [f"TEMPLATE {_in_quotes(entry.template)}"] if entry.template else []
    lines += [f"SYSTEM {_in_quotes(entry.system)}"] if entry.system else []
    lines += [f"PARAMETER {line}" for line in parameter_lines(entry.parameters)]
    lines += [f"MESSAGE {one['role']} {_in_quotes(one['content'])}" for one in entry.messages]
    lines += [f"LICENSE {_in_quotes(text)}" for text in entry.licenses]
    return "\n".join(lines) + "\n"


def parameter_lines(parameters: dict[str, Any]) -> list[str]:
    """Return `name value` for each value of each parameter."""
    return [
        f"{name} {json.dumps(one) if isinstance(one, (str, bool)) else one}"
        for name, value in sorted(parameters.items())
        for one in (value if isinstance(value, list) else [value])
    ]


def _in_quotes(text: str) -> str:
    return f"{_QUOTES}{text}{_QUOTES}"
