"""`make docs`: docs/ as pages, which are complete in themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


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
