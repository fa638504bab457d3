"""Makes the page of messages: every error and warning of the code, and where it is raised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("checkpoints", "cli", "configs", "engine", "server", "worker")
_LOGGED = {"warning", "error", "exception", "critical"}
_MIN_WORDS = 2  # a text of a single word is a name


@dataclass(frozen=True, order=True)
class Message:
    text: str  # `...` stands for values known only at run time
    kind: str  # the exception, or the level of the log
    file: str
    line: int


def messages(root: Path = ROOT) -> list[Message]:
    """Return every message of the code, sorted by its text."""
    found = (
        message
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        for message in _file_messages(root, path)
    )
    return sorted(found, key=lambda message: (message.text.lower(), message))


def _file_messages(root: Path, path: Path) -> Iterator[Message]:
    name = path.relative_to(root).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, call = _name(node.exc.func), node.exc
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGGED:
            kind, call = node.func.attr.upper(), node
        else:
            continue
        for text in _texts(call):
            yield Message(text, kind, name, node.lineno)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _texts(call: ast.Call) -> Iterator[str]:
    """Yield the messages among the arguments of a call."""
    for argument in [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "message")]:
        text = _template(argument)
        if text is not None and len(text.replace("...", "").split()) >= _MIN_WORDS:
            yield " ".join(text.split())
            return


def _template(node: ast.expr) -> str | None:
    """Return the text of a literal, with `...` for values filled in; None for other expressions."""
    match node:
        case ast.Constant(value=str() as text):
            return text.replace("%s", "...").replace("%d", "...")
        case ast.JoinedStr(values=values):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in values]
            return "".join(map(str, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            left_text, right_text = _template(left), _template(right)
            return None if left_text is None and right_text is None else f"{left_text or '...'}{right_text or '...'}"
        case ast.IfExp(body=body):
            return _template(body)
    return None


def page(found: list[Message]) -> str:
    """Return the page, in Markdown: messages by their first letter."""
    parts = [
        "# Messages\n\nEvery text with which quire refuses or warns, by its first words; `...` stands for what is"
        " filled in. A message names the parameter and the limit, and most name the remedy;"
        " [troubleshooting.md](troubleshooting.md) has more on the frequent ones. The last column leads to the code.\n"
    ]
    initial = ""
    for message in found:
        first = message.text[0].upper() if message.text[0].isalpha() else "..."
        if first != initial:
            initial = first
            parts.append(f"\n## {initial}\n\n| message | kind | raised in |\n|---|---|---|\n")
        text = message.text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
        parts.append(f"| {text} | {message.kind} | {message.file}:{message.line} |\n")
    return "".join(parts)
