"""The families that mark their thoughts with their own words or tokens."""

from __future__ import annotations

from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.recognition import has

GEMMA4 = ReasoningFormat(
    "gemma4",
    begin="<|channel>thought",
    end="<channel|>",
    recognize=has("<|channel>"),
    forced_end="<channel|>",
    tokens=("<|channel>", "<channel|>"),
)
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]", has("[THINK]"), forced_end="[/THINK]")
GRANITE = ReasoningFormat(  # Granite 3.2
    "granite",
    begin="Here is my thought process:",
    end="Here is my response:",
    recognize=has("Here is my thought process:"),
    forced_end="\n\nHere is my response:\n",
    other_begins=("Here's my thought process:",),
    other_ends=("Here's my response:",),
)
