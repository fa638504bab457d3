"""`make docs`: docs/ as pages, which are complete in themselves."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.site import sources

ROOT = Path(__file__).parent.parent.parent


def broken_links(site: Path) -> list[str]:
    """Links of the pages to files of the site that do not exist, and to places in them."""
    texts = {page: page.read_text("utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    places = {page: set(re.findall(r"""\bid="([^"]+)""", text)) | {""} for page, text in texts.items()}
    broken = []
    for page, text in texts.items():
        for link in set(re.findall(r"""<(?:a|img)\b[^>]*?(?:href|src)="([^"]+)""", text)):
            address, _, place = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", address) or address == "":
                continue
            target = (page.parent / address).resolve()
            if not target.exists() or (target in places and place not in places[target]):
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


def test_the_pages_build_without_a_network_and_load_nothing_from_another_host(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs-material (the extra `docs`)")
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, check=True)
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in tmp_path.glob("*.html")} >= {
        "index" if name == "README" else name for name in sources
    }
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text("utf-8"))
        assert not [address for address in loaded if re.match(r"https?:|//", address)], page.name
    assert not broken_links(tmp_path)


def test_links_beside_docs_lead_to_pages():
    text = "[a](../server/app.py) [b](gpu.md#memory) [c](https://x.y/z) [d](none.md)\n```\n[e](f)\n```\n"
    changed = "[a](tree/server/app.py.md) [b](gpu.md#memory) [c](https://x.y/z) [d](#)\n```\n[e](f)\n```\n"
    assert sources.rewrite("docs/page.md", text) == changed
    found = sources.sources({"docs/page.md": "[results](../benchmarks/RESULTS.md) [app](../server/app.py)"})
    assert "```python" in found["tree/server/app.py.md"]
    assert "](../../" in found["tree/benchmarks/RESULTS.md"]  # to docs/, two folders up


def test_the_navigation_has_every_page():
    named = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    made = {"examples.md", "all-flags.md", "other-flags.md", "all-messages.md", "model-files.md"}
    assert sorted(named) == sorted({page.name for page in (ROOT / "docs").glob("*.md")} | made)
