"""Recurrent states of a step that verifies drafts: a rejected draft must not have advanced the state.

Each draft advances the state by itself (`layers/state.py`, stages), and the states between drafts are written to spare
pages, which the engine does not know. When the tokens are known, the state after the last accepted one is copied to the
page that the engine meant the step to write.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache.allocation import state_layers
from quire.worker.platforms.base import Platform

NO_TOKEN = -2  # sampling gives -1 where no token can follow


class SpareStates:
    """The spare pages, `first` to `first + number - 1`, of the states of `model`."""

    def __init__(self, model: nn.Module, table: RequestTable, first: int, number: int) -> None:
        self.model, self.table, self.pages = model, table, range(first, first + number)
        self.group = next(g for g, group in enumerate(table.groups) if group.kind == "state")
        self._taken: dict[int, range] = {}  # batch position -> pages of its drafts, in the step that runs

    def begin(self, batch: InputBatch) -> dict[int, list[tuple[int, int]]]:
        """Assign a page to each draft of a step, which has at most as many drafts as there are pages. Returns where to
        leave states (`StateSteps.cuts`).
        """
        self._taken, start = {}, 0
        for i, draft in batch.drafts.items():
            self._taken[i] = self.pages[start : start + len(draft)]
            assert len(self._taken[i]) == len(draft), "a step verifies more drafts than there are spare pages"
            start += len(draft)
        return {i: list(enumerate(pages, 1)) for i, pages in self._taken.items()}

    def keep(self, batch: InputBatch, token_ids: torch.Tensor, platform: Platform) -> None:
        """Keep the states after the accepted drafts: those that equal the token sampled before them in `token_ids`
        `[S]`.
        """
        most, first, packed = max(map(len, batch.drafts.values())), 0, []
        for i in batch.step.samples:
            draft = batch.drafts.get(i, [])
            if draft:
                rest = most - len(draft)
                sampled = [*range(first, first + len(draft)), *[first] * rest]
                pages = [*self._taken[i], *[0] * rest]
                packed.append([batch.step.rows[i], len(draft), *sampled, *draft, *[NO_TOKEN] * rest, *pages])
            first += 1 + len(draft)
        sent = platform.to_device(np.array(packed, dtype=np.int64))
        rows, numbers = sent[:, 0], sent[:, 1]
        sampled, drafts, pages = sent[:, 2:].split(most, 1)
        right = (token_ids[sampled] == drafts).cumprod(1).sum(1)
        written = self.table.block_tables[self.group, rows, 1].long()
        rejecting = right < numbers
        after = pages.gather(1, right.clamp(max=most - 1)[:, None])[:, 0]
        kept = torch.where(rejecting, after, written)
        if not platform.overlaps:  # reading the mask costs no wait here: copy only after rejections
            written, kept = written[rejecting], kept[rejecting]
        if len(kept):
            for layer in state_layers(self.model):
                for states in layer.pages:
                    states[written] = states[kept]
