"""The recurrent states of a step that ran out of memory and is run again in parts.

A step that reads a state from one page and writes it to another can run again. One that updates a page in place cannot:
some layers may have processed its tokens, which would then count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.worker.attention.base import GroupedMetadata
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache.allocation import state_layers
from quire.worker.layers.state import StateSteps
from quire.worker.messages import StepInput


@dataclass(slots=True)
class SavedState:
    """A copy of one request's page, updated in place, in all layers."""

    pages: list[torch.Tensor]
    page: int
    copies: list[torch.Tensor]

    def restore(self) -> None:
        """Undo the changes of an unfinished step to the page."""
        for pages, copy in zip(self.pages, self.copies):
            pages[self.page] = copy


class StatePages:
    """Reads and changes the pages that `table` names for the states of `model`."""

    def __init__(self, model: nn.Module, table: RequestTable):
        self.model, self.table = model, table
        self.group = next((g for g, group in enumerate(table.groups) if group.kind == "state"), None)

    def leave(self, attn: GroupedMetadata, step: StepInput, spares: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Have the step leave the states between drafts in `spares`, and those at the checkpoints of prompts."""
        cuts = {
            i: [(num_tokens, self.table.state_page(page)) for num_tokens, page in stops]
            for i, stops in step.checkpoints.items()
        }
        if cuts or spares:
            backend = attn[self.group].backend
            assert isinstance(backend, StateSteps)
            backend.cuts = {**cuts, **spares}

    def in_place(self, rows: Sequence[int]) -> list[bool]:
        """Return whether a step updates the page of each of `rows` in place. Waits for the device."""
        if self.group is None:
            return [False] * len(rows)
        return [read == write for read, write in self.table.block_tables[self.group, list(rows), :2].tolist()]

    def advance(self, row: int, checkpoint: int | None) -> SavedState | None:
        """Let `row` read the page that the previous part wrote, and update it in place. Returns a copy of the
        page, None without states. The page is also copied to `checkpoint`, if given.
        """
        if self.group is None:
            return None
        pages = [pages for layer in state_layers(self.model) for pages in layer.pages]
        entry = self.table.block_tables[self.group, row]
        page = int(entry[1])
        copies = [layer_pages[page].clone() for layer_pages in pages]
        entry[0] = page
        if checkpoint is not None:
            for layer_pages, copy in zip(pages, copies):
                layer_pages[self.table.state_page(checkpoint)] = copy
        return SavedState(pages, page, copies)
