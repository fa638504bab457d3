"""Requests as rows of device tables: the tokens of each, and its KV blocks.

Rows are handed out by the scheduler and stay a request's own until a `NewRequest` overwrites them. Token ids are
written from `NewRequest` on admission and by `append` (the sampler's output) afterwards, and never leave the device in
between: a step names them by (row, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.worker.messages import CacheGroup, NewRequest, StepInput
from quire.worker.platforms.base import Platform


class RowState(Protocol):
    """What else is known per row (sampling parameters, a LoRA, a grammar ...).

    The table tells it which request a row holds.
    """

    def add(self, row: int, new: NewRequest) -> None:
        """`row` now holds `new`. Raises if the request cannot be served; it then fails alone."""

    def remove(self, row: int) -> None:
        """`row` no longer holds what it held; called before `add`, and for a row this object may never have seen."""


@dataclass(slots=True)
class TableUpdates:
    """What `apply` found to be written to the device, as flat lists that cross in the step's one copy."""

    block_indices: list[int] = field(default_factory=list)  # into block_tables.view(-1)
    block_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, how many of token_ids), in order


class RequestTable:
    """Token table `[max_num_reqs, max_model_len]` and block tables `[num_groups, max_num_reqs, max_blocks]`, int32 on
    the platform's device.

    Block ids are appended in the order they arrive; entries behind a row's last are leftovers (0, the null block, at
    first) and never read.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        platform: Platform,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
    ) -> None:
        self.platform, device = platform, platform.device
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_blocks = max(-(-max_model_len // block_size), 2)
        self.groups = groups
        self.token_table = torch.zeros(max_num_reqs, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(len(groups), max_num_reqs, self.max_blocks, dtype=torch.int32, device=device)
        self.num_prompt_tokens = [0] * max_num_reqs
        self.errors: dict[int, str] = {}  # row -> why its request cannot be served
        self._states: list[RowState] = []
        self._num_blocks = [[0] * max_num_reqs for _ in groups]

    def register(self, state: RowState) -> None:
        """Tell `state` from now on which request each row holds."""
        self._states.append(state)

    def apply(self, step: StepInput) -> TableUpdates:
        """Take in what the step changes. The tensors change when the result has been handed to `write`."""
        updates = TableUpdates()
        for new in step.new:
            self._add(new, updates)
        for row, blocks in zip(step.rows, step.new_blocks):
            if blocks:
                self._append_blocks(row, blocks, updates)
        return updates

    def write(
        self, updates: TableUpdates, block_indices: torch.Tensor, block_ids: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Write `updates` to the tables; the tensors are its lists on the device, int64."""
        if updates.block_indices:
            self.block_tables.view(-1)[block_indices] = block_ids.int()
        start = 0
        for row, count in updates.token_rows:
            self.token_table[row, :count] = token_ids[start : start + count]
            start += count

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, max_position: int) -> None:
        """Put one sampled token per row behind its tokens: `token_table[rows, positions] = token_ids`, all `[S]` int64;
        no position exceeds `max_position`.

        A negative token, of a request that has failed, becomes 0. A position of max_model_len has no place: that
        request has ended, and its token goes nowhere.
        """
        self.platform.ops.append_tokens(self.token_table, rows, positions, token_ids, max_position)

    def _add(self, new: NewRequest, updates: TableUpdates) -> None:
        row = new.row
        assert 0 <= row < self.max_num_reqs and len(new.token_ids) <= self.max_model_len
        self.errors.pop(row, None)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        for num_blocks in self._num_blocks:
            num_blocks[row] = 0
        for state in self._states:
            state.remove(row)
        try:
            check_token_ids("the prompt", new.token_ids, self.vocab_size)
            for state in self._states:
                state.add(row, new)
            token_ids = new.token_ids
        except Exception as error:  # MemoryError, too: whatever a request brings about is its own failure
            if (
                not isinstance(error, ValueError)
                and torch.distributed.is_available()
                and torch.distributed.is_initialized()
            ):
                raise  # the other ranks have taken it in: they cannot go on together
            self._reject(row, str(error) or type(error).__name__)
            token_ids = [0] * len(new.token_ids)  # it runs, harmlessly, until the scheduler has seen the error
        updates.token_rows.append((row, len(token_ids)))
        updates.token_ids += token_ids
        self._append_blocks(row, new.block_ids, updates)

    def _reject(self, row: int, reason: str) -> None:
        self.errors[row] = reason
        for state in self._states:
            state.remove(row)

    def _append_blocks(self, row: int, blocks: list[list[int]], updates: TableUpdates) -> None:
        """Append `blocks[g]` to the row's table of group g; those of a state replace what it has."""
        assert len(blocks) == len(self.groups), (row, blocks)
        for g, (group, added) in enumerate(zip(self.groups, blocks)):
            num_blocks = self._num_blocks[g]
            start = 0 if group.kind == "state" else num_blocks[row]
            num_blocks[row] = start + len(added)
            assert num_blocks[row] <= self.max_blocks, (row, num_blocks[row])
            first = (g * self.max_num_reqs + row) * self.max_blocks + start
            updates.block_indices += range(first, first + len(added))
            updates.block_ids += added


def check_token_ids(what: str, token_ids: list[int], vocab_size: int) -> None:
    """Raise ValueError, naming `what`, unless all ids are in the vocabulary: one outside would fail the whole batch on
    the device.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"{what} holds token id {bad}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
        )
