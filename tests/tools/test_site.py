"""The pages that `make docs` makes: from a running server, and from the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.configs.options import all_options
from quire.configs.peers.table import SERVERS, rows_of
from tools.site import endpoints, flags, messages, other_flags

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def found():
    return messages.messages()


@pytest.fixture(scope="module")
def answers(embedded_server):
    paths = embedded_server.http.get("/openapi.json").json()["paths"]
    return paths, list(endpoints.ask_all(embedded_server.url))


@pytest.mark.slow
def test_every_example_is_answered_as_its_page_says(answers):
    wrong = {
        f"{one.example.method} {one.path}": (one.status, one.answer[:300])
        for _, one in answers[1]
        if one.status != one.example.status
    }
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())


@pytest.mark.slow
def test_every_route_has_an_example(answers):
    paths, asked = answers
    shown = {(one.example.method.lower(), re.sub(r"\{\w+\}", "{}", one.example.path)) for _, one in asked}
    shown = {(method, path.replace("none-such", "{}")) for method, path in shown}
    missing = [
        f"{method} {path}"
        for path, methods in paths.items()
        for method in methods
        if (method, re.sub(r"\{\w+\}", "{}", path)) not in shown
        and not any(path.startswith(start) for starts in endpoints.ELSEWHERE.values() for start in starts)
    ]
    assert sorted(missing) == ["post /lora-adapters"]  # needs adapters: lora.md
    for page, starts in endpoints.ELSEWHERE.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        assert all(start.partition("{")[0].rstrip("/") in text for start in starts), page


def test_the_page_shows_requests_and_answers(answers):
    text = endpoints.page(iter(answers[1]))
    assert text.count("\n### ") == len(answers[1]) and text.count("```") == 4 * len(answers[1])
    assert '"finish_reason": "length"' in text and "curl -X DELETE" in text
    assert max(map(len, text.splitlines())) < 4000


@pytest.mark.slow
def test_every_message_of_the_code_has_an_entry(found):
    text = messages.page(found)
    assert len(found) > 800 and text.count("\n| ") == len(found) + text.count("| message |")
    assert "server/api/openai/" in text and "worker/" in text
    for known in ("there is no file", "--max-model-len"):
        assert any(known in message.text for message in found), known


def test_messages_are_found_in_every_form(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "some.py").write_text(
        "def f(x, logger):\n"
        "    if x: raise ValueError('a plain text')\n"
        "    if x: raise BadRequest(f'the value {x!r} is wrong', 'param')\n"
        "    if x: raise KeyError('name')\n"
        "    if x: raise RuntimeError('two ' + str(x) + ' parts here')\n"
        "    logger.warning('the disk %s is full', x)\n"
        "    raise\n"
    )
    assert [(one.text, one.kind, one.line) for one in messages.messages(tmp_path)] == [
        ("a plain text", "ValueError", 2),
        ("the disk ... is full", "WARNING", 6),
        ("the value ... is wrong", "BadRequest", 3),
        ("two ... parts here", "RuntimeError", 5),
    ]


def test_all_flags_of_quire_are_listed():
    text = flags.page()
    assert all(f"`{option.flag}`" in text for option in all_options().values())
    assert text.count('"></a>`-') == len(all_options())


@pytest.mark.parametrize("server", SERVERS)
def test_all_flags_of_others_are_listed_with_links_to_ours(server):
    text = other_flags.page().partition(f"## {server}\n")[2].partition("\n## ")[0]
    assert {row.name for row in rows_of(server)} <= set(re.findall(r"`([^`]+)`", text))
    targets = re.findall(r"\(all-flags\.md#([\w-]+)\)", text)
    assert targets and all(f'<a id="{target}"></a>' in flags.page() for target in targets)


@pytest.mark.slow
def test_frequent_messages_are_explained_as_the_code_writes_them(found):
    """Each heading of troubleshooting.md is a message of the code, `...` for what is filled in."""
    known = [message.text for message in found]
    headings = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) >= 20
    for heading in headings:
        parts = [part for part in heading.split("...") if part.strip()]
        assert any(all(part in text for part in parts) for text in known), heading


def test_files_that_pages_name_exist():
    """In code spans: paths below a folder of the tree. `...` and `*` stand for several."""
    roots = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    wrong = [
        f"{page.name}: {name}"
        for page in [*DOCS.glob("*.md"), *ROOT.glob("*.md")]
        for name in re.findall(rf"`((?:{roots})/[\w./-]+)`", page.read_text(encoding="utf-8"))
        if "..." not in name and not (ROOT / name).exists()
    ]
    assert not wrong


MAX_WORDS = 27_800  # as `wc -w` counts; raise it only for a feature that users need to read about


def test_each_thing_is_said_once():
    """All documents together stay within a limit: link instead of repeating, git keeps history."""
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    words = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8").split() for page in pages}
    assert len(words) > 30
    del words["docs/model-types.md"]  # a generated table
    # its names of families are generated, too
    words["docs/models.md"] = [word for word in words["docs/models.md"] if not word.startswith("`")]
    num_words = {name: len(found) for name, found in words.items()}
    assert sum(num_words.values()) <= MAX_WORDS, sorted(num_words.items(), key=lambda item: -item[1])


def test_examples_are_json():
    for examples in endpoints.SECTIONS.values():
        for example in examples:
            json.dumps(example.body)
