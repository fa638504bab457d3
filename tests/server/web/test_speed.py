"""The page keeps up with a long answer: each piece costs the same, however long the answer is.

Times are measured by `python -m benchmarks.page`.
"""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import needs_chromium
from tests.server.web.long_texts import TEXTS

pytestmark = [needs_chromium, pytest.mark.slow]
LENGTH = 24_000  # characters of a text that grows
MOST_READ, MOST_TOUCHED = 16_000, 700  # characters read and nodes changed for one piece: of two parts of a paragraph
GROW = """
(async () => {
  const [{LiveMarkdown}, {parsed}] = await Promise.all([import('/ui/live.js'), import('/ui/inline.js')]);
  const finished = [], live = new LiveMarkdown({}, node => finished.push(node)), seen = new MutationObserver(() => {});
  document.body.append(live.node);
  seen.observe(live.node, {childList: true, characterData: true, subtree: true});
  const most = {read: 0, touched: 0, written: 0};
  for (let end = 0; end < text.length; end += 53) {
    const before = parsed.characters;
    live.update(text.slice(0, end), false);
    let touched = 0;
    for (const {type, addedNodes, removedNodes} of seen.takeRecords()) {
      touched += type === 'characterData' ? 1 : addedNodes.length + removedNodes.length;
    }
    most.read = Math.max(most.read, parsed.characters - before);
    most.touched = Math.max(most.touched, touched);
  }
  live.update(text, true);
  const whole = new LiveMarkdown({});
  whole.update(text, true);
  for (const {node} of [live, whole]) {
    for (const part of node.querySelectorAll('.part:empty, tbody:empty')) part.remove();
  }
  live.node.remove();
  return {
    ...most,
    same: live.node.innerHTML === whole.node.innerHTML,
    finished: finished.every(node => live.node.contains(node)),
    text: whole.node.textContent,
    children: Math.max(...[whole.node, ...whole.node.querySelectorAll('*')].map(node => node.children.length)),
  };
})()
"""
LINES = [
    *("", "", "word *word* `code`", "  two spaces", "# Heading #", "---", "- item", "  - inner", "    - innermost"),
    *(
        "1. one",
        "2) two",
        "   continued",
        "> quoted",
        "> - in a quote",
        "> > twice",
        "```python",
        "```",
        "  ```",
        "~~~",
    ),
    *(
        "| a | b |",
        "|---|---|",
        "| 1 | `2` |",
        "$$",
        "x^2 $$",
        r"\[ y \]",
        r"\[",
        "$$ z $$",
        "ends  ",
        "\t- tabbed",
        "***",
    ),
    *(
        "**never closed",
        "[label](https://example.com/a)",
        "* * *",
        "-",
        "10. ",
        "a | b",
        "-|-",
        "\u65e5\u672c\u8a9e",
        "x\r",
    ),
]


def grow(page, text: str) -> dict:
    return page.js(f"(text => {GROW})({json.dumps(text)})")


@pytest.mark.parametrize("kind", TEXTS)
def test_a_piece_of_a_long_answer_costs_no_more_than_one_of_a_short_answer(page, scripted, kind):
    page.open(scripted[0].url + "/")
    found = grow(page, TEXTS[kind][:LENGTH])
    assert found["same"] and found["finished"]
    assert found["read"] <= MOST_READ and found["touched"] <= MOST_TOUCHED
    assert found["children"] <= 300  # of one node, which are laid out with each change of it


def test_what_grows_piece_by_piece_is_what_is_shown_at_once(page, scripted):
    page.open(scripted[0].url + "/")
    for seed in range(60):
        rng = random.Random(seed)
        text = "\n".join(rng.choice(LINES) for _ in range(rng.randint(1, 60)))
        found = grow(page, text)
        assert found["same"] and found["finished"], (seed, text)


def test_a_long_paragraph_loses_nothing_where_it_is_cut(page, scripted):
    page.open(scripted[0].url + "/")
    texts = ["word " * 4000, "x" * 20_000, "\u65e5\u672c\u8a9e\u3002" * 5000, "\U0001f600" * 9000]
    texts += ["a `b` *c* " * 2000, "x" + "`" * 9000]  # at the beginning of a line they open a block of code
    for text in texts:
        plain = text.replace("a `b` *c* ", "a b c ").strip()
        assert grow(page, text)["text"].strip() == plain
