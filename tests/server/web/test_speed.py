"""The page keeps up: first paint, frames while a long answer arrives, the Stop button under an endless stream."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import needs_chromium
from tests.server.web.using import fresh, say

pytestmark = [needs_chromium, pytest.mark.slow]
PART = """## Part {i}

A paragraph with **strong** words, `code` and a [link](https://example.com/{i}), which fills a line or two.

- one item of a list
- another *item*

```python
def part_{i}(a, b):
    return a + b
```

"""
TEXTS = {
    "mixed": "".join(PART.format(i=i) for i in range(400)),
    "code": "```python\n" + "".join(f"value_{i} = compute({i}, 'text')\n" for i in range(1800)) + "```\n",
    "list": "".join(f"- item {i} with **some** words\n" for i in range(2000)),
    "paragraph": "word and `more` of it, " * 4000,
}
WATCH = """
window.tasks = [];
new PerformanceObserver(list => window.tasks.push(...list.getEntries().map(e => e.duration)))
  .observe({type: 'longtask'})
"""


@pytest.fixture
def fast(scripted):
    server, script = scripted
    yield server, script
    script.pause = 0.0


def test_a_long_answer_leaves_the_page_free(page, fast):
    """About 20,000 tokens at up to 1,000 events/s. On two idle cores no task takes 100 ms; a busy machine adds some."""
    server, script = fast
    fresh(page, server.url + "/")
    script.says(TEXTS["mixed"], seed=1)  # about five bytes at once
    script.pause = 0.001
    page.js(WATCH)
    say(page, "Write")
    page.wait("document.querySelectorAll('.message.assistant .figures').length === 1", timeout=120)
    tasks = page.js("window.tasks")
    assert max(tasks, default=0) < 1000 and len([one for one in tasks if one >= 100]) < 40


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_grows_ends_as_it_is_shown_at_once(page, scripted, kind):
    page.open(scripted[0].url + "/")
    text = json.dumps(TEXTS[kind][:12_000])
    live = "const live = new l.LiveMarkdown({}); "
    live += "for (let i = 0; i < text.length; i += 37) live.update(text.slice(0, i), false);"
    load = "const [l, m] = await Promise.all([import('/ui/live.js'), import('/ui/live.js')]);"
    grown = f"(async () => {{ const text = {text}; {load} {live}"
    whole = "m.markdown(text).map(n => n.textContent).join('')"
    same = f"live.update(text, true); return live.node.textContent === {whole}; }})()"
    assert page.js(f"{grown} {same}")
