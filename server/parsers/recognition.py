"""The evidence by which formats are recognized: the source of a model's chat template, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable

HasToken = Callable[[str], bool]  # whether the tokenizer has this string as one token
Recognize = Callable[[str, HasToken], str | None]  # the reason why a chat template's models use the format, or None


def has(*needles: str) -> Recognize:
    """Return a function that recognizes templates that have all of these strings."""

    def recognize(template: str, has_token: HasToken) -> str | None:
        if all(needle in template for needle in needles):
            return f"the chat template has {' and '.join(needles)}"
        return None

    return recognize
