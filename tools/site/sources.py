"""Makes pages of files outside docs/ that other pages link to, so that the built site is complete."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "tree"  # for the site
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".sh": "sh", ".yaml": "yaml", ".toml": "toml"}


def sources(texts: dict[str, str]) -> dict[str, str]:
    """Return pages by their path in the site: one for each file that `texts` (by path in the tree) and these pages link
    to.

    Folders have none.
    """
    found: dict[str, str] = {}
    waiting = dict(texts)
    while waiting:
        name, text = waiting.popitem()
        for link, _ in _LINK.findall(text):
            target = _target(name, link)
            if target and page_of(target) not in found and not target.startswith("docs/") and (ROOT / target).is_file():
                content = (ROOT / target).read_text(encoding="utf-8")
                found[page_of(target)] = content
                if target.endswith(".md"):
                    waiting[target] = content
    return {page: _page(page, text) for page, text in found.items()}


def _target(name: str, link: str) -> str:
    """Return the path in the tree of a link in the file `name`; empty if it leads outside."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    return "" if path.startswith("..") else path


def page_of(target: str) -> str:
    """Return the path in the site of a file of the tree."""
    return (
        target.removeprefix("docs/") if target.startswith("docs/") else f"{FOLDER}/{target}".removesuffix(".md") + ".md"
    )


def _page(page: str, text: str) -> str:
    name = page.removeprefix(f"{FOLDER}/").removesuffix(".md")
    if not (ROOT / name).is_file():  # a page itself
        return rewrite(f"{name}.md", text)
    fence = "`" * 8
    return f"# {name}\n\n{fence}{_LANGUAGES.get(Path(name).suffix, '')}\n{text}{fence}\n"


def rewrite(name: str, text: str) -> str:
    """Return the Markdown of the file `name` with links to pages of the site. Links to files without a page become
    their text.
    """

    def replaced(match: re.Match) -> str:
        target = _target(name, match[1])
        if not target or not (ROOT / target).is_file():
            return "#"
        here = posixpath.dirname(page_of(name))
        return posixpath.relpath(page_of(target), here or ".") + (match[2] or "")

    return _outside_code(text, lambda part: _LINK.sub(replaced, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
