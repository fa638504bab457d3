"""A reasoning format: how one family of models marks its thoughts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.parsers.reader import SPACE
from quire.server.parsers.recognition import Recognize


@dataclass(frozen=True)
class ReasoningFormat:
    """Thoughts between two markers, one or several times in an answer. Stateless: one object serves all requests.

    `end` closes a block: a grammar starts after it. `forced_end` is the text that ends the thoughts when their budget
    is spent, `forced_to_calls` the same where a grammar of calls covers the thoughts. `recognize` returns the reason
    why a chat template's models think in this format, or None.
    """

    name: str
    begin: str
    end: str
    recognize: Recognize
    forced_end: str = ""
    interrupts: tuple[str, ...] = ()  # beginnings of calls that end a block without its end marker
    other_begins: tuple[str, ...] = ()  # variants of `begin` and `end`
    other_ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()  # marks around the content
    tokens: tuple[str, ...] = ()  # special tokens of the format, if they are not `begin` and `end`
    forced_to_calls: str = ""
    assumed: bool = False  # the answer begins inside a block even where neither prompt nor answer has `begin`

    @property
    def begins(self) -> tuple[str, ...]:
        return self.begin, *self.other_begins

    @property
    def ends(self) -> tuple[str, ...]:
        return self.end, *self.other_ends

    @property
    def strays(self) -> tuple[str, ...]:
        """Return the markers that reach neither content nor thoughts."""
        return (*self.begins, *self.ends, *self.dropped, *self.markers)

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the special tokens that detokenized text must show."""
        return self.tokens or (self.begin, self.end)

    def opened(self, prompt: str) -> bool:
        """Return whether the answer to this rendered prompt (its tail is enough) begins inside a block."""
        tail = prompt[-256:].rstrip(SPACE)
        return tail.endswith(self.begin.rstrip(SPACE)) or (self.assumed and not tail.endswith(self.end))
