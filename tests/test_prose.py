"""Counts constructions that make a native reader of English stop, in comments, docstrings and documents."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "checkpoints", "cli", "configs", "engine", "quire", "server", "tools", "worker")
MAX_PER_1000_WORDS = 1.0  # of comments and docstrings
ODD = {
    # a sentence or docstring that opens with a clause instead of its subject
    "opener": re.compile(r"(?:^|(?<=[.!?:] ))(?:Of (?!course)|Whether |Whose |Whoever |What |Which )", re.MULTILINE),
    "what": re.compile(r"(?:(?<=[,;(] )|\b(?:of|to|for|by|from|with|than|as|and|or|is|are|say|says) )what \w"),
    "nobody": re.compile(r"\b[Nn]obody\b|\bnothing (?:of|else|more|but)\b|\b[Nn]one other\b"),
    "beside": re.compile(r"\b[Bb]eside\b"),
    "so many": re.compile(r"\bso (?:many|much)\b(?! that)|\bof (?:ours|theirs|its own kind)\b"),
    "behind": re.compile(r"\bbehind (?:it|them|one another|each other|the (?:prompt|token|last|first)\w*)\b"),
}

# a string, or as a group a comment: ten times as fast as tokenize
COMMENT = re.compile(
    r"""\"{3}[\s\S]*?\"{3}|'{3}[\s\S]*?'{3}|"(?:\\[\s\S]|[^"\\\n])*"|'(?:\\[\s\S]|[^'\\\n])*'|(\#.*)"""
)


def prose(text: str) -> Iterator[str]:
    """Yield docstrings and comments of a Python source; adjacent comment lines are one text."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)):
        if docstring := ast.get_docstring(node):
            yield docstring
    lines: list[str] = []
    last = 0
    number = start = 0
    for found in COMMENT.finditer(text):
        comment = found.group(1)
        if not comment or comment.startswith(("# noqa", "# type", "#!")):
            continue
        number, start = number + text.count("\n", start, found.start()), found.start()
        if number != last + 1 and lines:
            yield " ".join(lines)
            lines = []
        lines.append(comment.lstrip("# "))
        last = number
    if lines:
        yield " ".join(lines)


def odd(text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, excerpt) of each odd construction of `text`."""
    text = re.sub(r"`[^`]*`", "`x`", re.sub(r"\s*\n\s*", " ", text))
    for kind, pattern in ODD.items():
        for match in pattern.finditer(text):
            yield kind, text[max(match.start() - 30, 0) : match.end() + 40]


def document_text(page: Path) -> str:
    """Return a document without its code blocks, rows and headings kept apart."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\n(?=[|#-])|\n\n", ". ", text)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_reads_at_once(folder):
    found: list[str] = []
    kinds: Counter[str] = Counter()
    words = 0
    for path in sources(folder):
        for text in prose(path.read_text(encoding="utf-8")):
            words += len(text.split())
            for kind, excerpt in odd(text):
                kinds[kind] += 1
                found.append(f"{path.relative_to(ROOT)}: {kind}: ...{excerpt}...")
    most = MAX_PER_1000_WORDS * max(words, 1000) / 1000
    assert len(found) <= most, "\n".join([f"{dict(kinds)} in {words} words", *found])


def test_documents_read_at_once():
    """At most one odd construction per 1,000 words of all documents."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    texts = {page.relative_to(ROOT): document_text(page) for page in pages}
    words = sum(len(text.split()) for text in texts.values())
    found = [f"{page}: {kind}: ...{excerpt}..." for page, text in texts.items() for kind, excerpt in odd(text)]
    assert words > 10_000 and len(found) <= words / 1000, "\n".join([f"{len(found)} in {words} words", *found])
