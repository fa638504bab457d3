"""Device tables with one row per request: its tokens and its KV blocks.

The scheduler assigns rows. A row belongs to its request until a `NewRequest` overwrites it. Token ids are written from
`NewRequest` on admission and by `append` (the sampler's output) afterwards, and stay on the device: a step addresses
them by (row, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from quire.worker.messages import CacheGroup, NewRequest, StepInput
from quire.worker.platforms.base import Platform


class RowState(Protocol):
    """Further state per row: sampling parameters, a LoRA, a grammar.

    The table reports which request each row holds.
    """

    def add(self, row: int, new: NewRequest) -> None:
        """Note that `row` now holds `new`. Raises if the request cannot be served; then only this request fails."""

    def remove(self, row: int) -> None:
        """Note that `row` no longer holds its request. Called before `add`, and also for rows that were never added."""


@dataclass(slots=True)
class TableUpdates:
    """Pending writes to the device tables, as flat lists that are copied with the step's other inputs."""

    block_indices: list[int] = field(default_factory=list)  # into block_tables.view(-1)
    block_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, number of token_ids for it), in order


class RequestTable:
    """Token table `[max_num_reqs, max_model_len]` and block tables `[num_groups, max_num_reqs, max_blocks]`, int32 on
    the platform's device.

    Block ids are appended in the order of arrival. Entries after a row's last one are stale (initially 0, the null
    block) and never read.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        platform: Platform,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
        num_blocks: int = 1,
    ) -> None:
        """Allocate the tables. Ids from `num_blocks` on are pages for states, which the table numbers from 1."""
        self.platform, device = platform, platform.device
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.vocab_size = vocab_size
        # entries that groups of kind "cross" read for every token
        self.cross_blocks = max((-(-g.window // block_size) for g in groups if g.kind == "cross"), default=0)
        self.max_blocks = max(-(-max_model_len // block_size), self.cross_blocks, 2)
        self.groups, self.first_state = groups, num_blocks - 1
        self.has_states = any(group.kind == "state" for group in groups)
        self.token_table = torch.zeros(max_num_reqs, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(len(groups), max_num_reqs, self.max_blocks, dtype=torch.int32, device=device)
        self.num_prompt_tokens = [0] * max_num_reqs
        self.errors: dict[int, str] = {}  # row -> error of its request
        self._states: list[RowState] = []
        self._num_blocks = [[0] * max_num_reqs for _ in groups]

    def register(self, state: RowState) -> None:
        """Report to `state` from now on which request each row holds."""
        self._states.append(state)

    @property
    def num_tokens(self) -> int:
        """Return the capacity of the KV cache in tokens."""
        return self.first_state * self.block_size

    def state_page(self, block_id: int) -> int:
        """Return the number of a page for states by its id, 0 for the null block's."""
        return max(block_id - self.first_state, 0)

    def num_slots(self, row: int) -> int:
        """Return the number of tokens of a row that fit into its KV blocks and into the table."""
        others = "state", "cross"
        numbers = (one[row] for group, one in zip(self.groups, self._num_blocks) if group.kind not in others)
        return min(min(numbers) * self.block_size, self.max_model_len)

    def apply(self, step: StepInput) -> TableUpdates:
        """Process the changes of a step. The device tensors change when the result is passed to `write`."""
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
        """Write `updates` to the tables. The tensors are its lists on the device, int64."""
        if updates.block_indices:
            self.platform.ops.write_entries(self.block_tables.view(-1), block_indices, block_ids)
        start = 0
        for row, count in updates.token_rows:
            self.token_table[row, :count] = token_ids[start : start + count]
            start += count

    def write_drafts(self, rows: list[int], positions: list[int], token_ids: list[int]) -> None:
        """Write draft tokens after the known tokens of their rows; all lists are parallel. The next `append` overwrites
        those that were rejected.
        """
        row, position, ids = self.platform.to_device(np.array([rows, positions, token_ids], dtype=np.int64))
        self.token_table[row, position] = ids.int()

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, max_position: int) -> None:
        """Append one sampled token per row: `token_table[rows, positions] = token_ids`, all `[S]` int64. No position
        exceeds `max_position`.

        A negative token, of a failed request, is stored as 0. A token at position max_model_len is dropped: its request
        has finished.
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
        except Exception as error:  # any error, including MemoryError, fails this request only
            if (
                not isinstance(error, ValueError)
                and torch.distributed.is_available()
                and torch.distributed.is_initialized()
            ):
                raise  # the other ranks may have accepted the request: the ranks cannot continue together
            self._reject(row, str(error) or type(error).__name__)
            token_ids = [0] * len(new.token_ids)  # it runs with zeros until the scheduler processes the error
        updates.token_rows.append((row, len(token_ids)))
        updates.token_ids += token_ids
        self._append_blocks(row, new.block_ids, updates)

    def _reject(self, row: int, reason: str) -> None:
        self.errors[row] = reason
        for state in self._states:
            state.remove(row)

    def _append_blocks(self, row: int, blocks: list[list[int]], updates: TableUpdates) -> None:
        """Append `blocks[g]` to the row's table of group g; in a state group they replace the entries."""
        assert len(blocks) == len(self.groups), (row, blocks)
        for g, (group, added) in enumerate(zip(self.groups, blocks)):
            num_blocks = self._num_blocks[g]
            start = 0 if group.kind == "state" else num_blocks[row]
            num_blocks[row] = start + len(added)
            assert num_blocks[row] <= self.max_blocks, (row, num_blocks[row])
            first = (g * self.max_num_reqs + row) * self.max_blocks + start
            updates.block_indices += range(first, first + len(added))
            if group.kind == "state":
                added = [self.state_page(block_id) for block_id in added]
            updates.block_ids += added


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raise ValueError, naming the parameter `name`, unless all ids are in the vocabulary. An id outside it would fail
    the whole batch on the device.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"{name} contains token id {bad}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
        )
