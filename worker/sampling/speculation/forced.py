"""Drafts from a request's grammar: tokens that are the only ones that it allows, and guesses of how the model spells a
text that it forces, such as the keys of a JSON schema.
"""

from __future__ import annotations

from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.drafter import History


class GrammarDrafter:
    def __init__(self, grammars: GrammarRows, guess: bool) -> None:
        """With `guess` drafts need not be certain."""
        self.grammars, self.guess = grammars, guess

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        return self.grammars.forced(row, limit, self.guess) if history.has_grammar else []
