"""What the tests of the page at `/` share: texts, images, and the steps of a person."""

from __future__ import annotations

from tests.helpers.server.scripted import Script
from tests.server.web.browser import Browser

MARKDOWN = """# Title

A *soft* and **loud *mixed* word**, `code <b>`, a [link](https://example.com/a) and [no link](javascript:alert(1)).

1. one
   - inner
2. two

> quoted

| name | value |
|---|---|
| a | `1` |

```python
print("<script>alert(1)</script>")
```

<img src=x onerror="document.title='broken'"> ![picture](https://example.com/p.png)
"""
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAAEElEQVR4nGP4z8AARwzEcQCukw/x0F8jngAAAABJRU5ErkJggg=="
FILE = f"new File([Uint8Array.from(atob('{PNG}'), c => c.charCodeAt(0))], 'dot.png', {{type: 'image/png'}})"
TRANSFER = f"(() => {{ const data = new DataTransfer(); data.items.add({FILE}); return data; }})()"
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

CUT = """
window.cut = true;
window.reached = window.fetch;
window.fetch = (...all) => window.cut ? Promise.reject(new TypeError('Failed to fetch')) : window.reached(...all)
"""
BLOCKS = (  # of a Markdown text
    "text => import('/ui/live.js').then(m => { const live = new m.LiveMarkdown({}); live.update(text, true); "
    "return [...live.node.childNodes]; })"
)


def started(page: Browser, url: str) -> None:
    page.open(url)
    page.wait("document.querySelector('#settings input') !== null")


def fresh(page: Browser, url: str) -> None:
    """The page with a new conversation."""
    started(page, url)
    page.click("#new")


def say(page: Browser, text: str) -> None:
    page.type("#input", text)
    page.press("Enter")


def answered(page: Browser, count: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.message.assistant .figures').length === {count}")


def with_versions(page: Browser, script: Script, text: str, question: str) -> None:
    """Ask, and regenerate the answer `text`."""
    script.says(text)
    say(page, question)
    answered(page)
    page.click(".message.assistant button", "Regenerate")
    page.wait("document.querySelector('.versions') !== null")
    answered(page)


def last(page: Browser, selector: str = ".text") -> str:
    return page.js(f"[...document.querySelectorAll('.message.assistant {selector}')].at(-1).innerText")


def enter_key(page: Browser, key: str) -> None:
    page.wait("document.querySelector('#dialog').open && document.querySelector('#key') !== null")
    page.js("document.querySelector('#key').select()")
    page.type("#key", key)
    page.press("Enter")
