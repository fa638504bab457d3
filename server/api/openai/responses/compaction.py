"""Compaction: a request whose input ends with a `compaction_trigger` gets one item that replaces the conversation so
far: a summary that the model writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.server.values import Json

TRIGGER = "compaction_trigger"
_ASK = (
    "Summarize this conversation for whoever continues it without having seen it: the task and its constraints, what "
    "was decided, done and found, with the names of files, commands and values, and what remains to be done. Write "
    "only the summary."
)
_TOLD = "Summary of the conversation before this message:\n\n"


class _Item(Protocol):
    type: str | None


def is_asked(items: str | Sequence[_Item] | None) -> bool:
    """Return whether an input asks for a summary of the conversation."""
    return not isinstance(items, str) and bool(items) and items[-1].type == TRIGGER


def request() -> dict[str, Json]:
    """Return the message that asks the model for the summary."""
    return {"role": "user", "content": _ASK}


def summary(text: str) -> dict[str, Json]:
    """Return the message that gives the model the summary."""
    return {"role": "user", "content": _TOLD + text}
