"""Answers of about 20,000 tokens, each long in another way."""

from __future__ import annotations

_PART = """## Part {i}

A paragraph with **strong** words, `code` and a [link](https://example.com/{i}), which fills a line or two.

- one item of a list
- another *item*

```python
def part_{i}(a, b):
    return a + b
```

"""
TEXTS = {
    "mixed": "".join(_PART.format(i=i) for i in range(400)),
    "code": "```python\n" + "".join(f"value_{i} = compute({i}, 'text')\n" for i in range(2400)) + "```\n",
    "line of code": "```json\n" + "".join(f'{{"key_{i}": [1, 2, 3]}}, ' for i in range(4000)) + "\n```\n",
    "list": "".join(f"- item {i} with **some** words\n" for i in range(2800)),
    "numbered list": "".join(f"{i}. item {i} with **some** words\n" for i in range(2800)),
    "list in an item": "- top\n" + "".join(f"  - item {i} with **some** words\n" for i in range(2800)),
    "code in an item": "1. top\n   ```python\n" + "".join(f"   value_{i} = {i}\n" for i in range(4000)),
    "paragraph": "word and `more` of it, it goes on. " * 2600,
    "lines": "one line after *another*\n" * 3600,
    "word": "abcdefghij" * 9000,
    "table": "| a | b | c |\n|---|---|---|\n"
    + "".join(f"| cell {i} | **x** {i} | words of a cell |\n" for i in range(2000)),
    "quote": "".join(f"> line {i} of a quote with `code`\n" for i in range(2400)),
    "formulas": "".join(
        f"Given $x_{i}^2 + y$ we have\n\n$$\\int_0^{i} x dx = \\frac{{1}}{{2}}$$\n\n" for i in range(1200)
    ),
}
