"""Recurrent states of a step that verifies drafts: a rejected draft must not have passed the state.

Each draft passes the state by itself (`layers/state.py`, stages), and the states between them are written to spare
pages, which the engine does not know. When the tokens are known, the state after the last accepted one is copied to the
page that the engine meant the step to write.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache.allocation import state_layers


class SpareStates:
    """Pages `first` to `first + number - 1` of the states of `model`."""

    def __init__(self, model: nn.Module, table: RequestTable, first: int, number: int) -> None:
        self.model, self.table, self.pages = model, table, range(first, first + number)
        self.group = next(g for g, group in enumerate(table.groups) if group.kind == "state")
        self._taken: dict[int, range] = {}  # batch position -> pages of its drafts, in the step that runs

    def begin(self, batch: InputBatch) -> dict[int, list[tuple[int, int]]]:
        """Give a page to each draft of a step, of which there are at most as many as pages. Returns where to leave
        states (`StateSteps.cuts`).
        """
        self._taken, start = {}, 0
        for i, draft in batch.drafts.items():
            self._taken[i] = self.pages[start : start + len(draft)]
            assert len(self._taken[i]) == len(draft), "a step verifies more drafts than there are spare pages"
            start += len(draft)
        return {i: list(enumerate(pages, 1)) for i, pages in self._taken.items()}

    def keep(self, batch: InputBatch, num_accepted: dict[int, int]) -> None:
        """Keep the states after the accepted drafts, of which the request at batch position i has `num_accepted[i]`."""
        rejecting = {i: pages[num_accepted[i]] for i, pages in self._taken.items() if num_accepted[i] < len(pages)}
        if rejecting:
            rows = [batch.step.rows[i] for i in rejecting]
            kept, written = torch.tensor(list(rejecting.values())), self.table.block_tables[self.group, rows, 1].long()
            for layer in state_layers(self.model):
                for pages in layer.pages:
                    pages[written] = pages[kept]
