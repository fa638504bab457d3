"""The examples of the README and of docs/tools.md, as they are printed there, and that the links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def execute(example: str, url: str) -> None:
    exec(compile(example.replace("http://127.0.0.1:8000/v1", url), "example", "exec"), {"__name__": "example"})


@pytest.mark.slow
def test_the_first_request_has_the_answer_that_is_printed_below_it(url):
    (request,) = [block for block in blocks("sh", README) if block.startswith("curl")]
    (printed,) = map(json.loads, blocks("json", README))
    (path,), (body,) = re.findall(r"8000/v1(\S+)", request), re.findall(r"-d '(.*)'", request)
    answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60).json()
    for field in ("object", "model"):
        assert answer[field] == printed[field]
    (choice,), (expected,) = answer["choices"], printed["choices"]
    assert choice["message"] == choice["message"] | expected["message"]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert answer["usage"] == answer["usage"] | printed["usage"]


def test_the_example_of_streaming(url, capsys):
    (example,) = blocks("python", README)
    execute(example.replace("stream=True", "stream=True, temperature=0"), url)
    assert "blue" in capsys.readouterr().out


def test_the_example_of_tools_and_schemas(url, capsys):
    text = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    (example,) = [block for block in blocks("python", text) if "pydantic_function_tool" in block]
    said = re.findall(r"print\(.*\)  # (.*)", example)
    execute(example, url)
    assert capsys.readouterr().out.splitlines() == said != []


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_titles_that_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"\w+:", link):
            path, _, title = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not title or title in anchors(target.read_text(encoding="utf-8")), link
