"""Drafts from a request's grammar: tokens that are the only ones that it allows, and guesses of how the model spells a
text that it forces, such as the keys of a JSON schema.
"""

from __future__ import annotations

from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.drafter import History


class GrammarDrafter:
    def __init__(self, grammars: GrammarRows, guess: bool) -> None:
        """Propose forced tokens and, with `guess`, drafts that are not certain."""
        self.grammars, self.guess = grammars, guess
        self._found: dict[int, list[int]] = {}

    def prepare(self, limits: dict[int, int]) -> None:
        """Find the drafts that `propose` will return for rows with a grammar, at most `limits[row]` tokens each: all at
        once, because each call waits for the thread of the grammars.
        """
        self._found = self.grammars.forced(limits, self.guess) if limits else {}

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        return self._found.pop(row, [])[:limit]
