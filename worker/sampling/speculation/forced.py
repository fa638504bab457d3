"""Drafts of certainty: tokens that are the only ones that a request's grammar allows."""

from __future__ import annotations

from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.drafter import History


class GrammarDrafter:
    def __init__(self, grammars: GrammarRows) -> None:
        self.grammars = grammars

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        return self.grammars.forced(row, limit) if history.has_grammar else []
