"""Vectors instead of tokens: pools the hidden states of prompts as their chunks are computed."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import NewRequest, PoolingParams, StepInput
from quire.worker.platforms.base import Platform
from quire.worker.transformer.decoder import CausalLM


@dataclass(slots=True)
class Pooled:
    """Vectors being copied to the host. Read them after the step's event has passed."""

    parts: list[tuple[list[int], torch.Tensor]]  # (batch positions, vectors [P, D] float32)

    def messages(self) -> dict[int, bytes] | None:
        """Return batch position -> bytes of the vector, or None without vectors."""
        found = {i: row.tobytes() for positions, matrix in self.parts for i, row in zip(positions, matrix.numpy())}
        return found or None


class Pooling:
    """A `RowState`: the rows whose prompts become vectors, and their pooled chunks so far.

    A step that runs out of memory after `compute` is computed again, so its chunks count only from `commit` on.
    """

    def __init__(self, table: RequestTable, platform: Platform, model: CausalLM) -> None:
        self.table, self.platform, self.model = table, platform, model
        self.rows: dict[int, PoolingParams] = {}
        self._second_starts: dict[int, int] = {}  # for the rows that are pairs
        self._states: dict[int, list[torch.Tensor]] = {}
        self._pending: dict[int, list[torch.Tensor]] = {}

    def add(self, row: int, new: NewRequest) -> None:
        if new.pooling is not None:
            self.rows[row] = msgspec.structs.replace(new.pooling, second_start=0)  # equal rows are finished together
            if new.pooling.second_start:
                self._second_starts[row] = new.pooling.second_start

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)
        self._second_starts.pop(row, None)
        self._states.pop(row, None)

    def needed(self, step: StepInput) -> bool:
        """Return whether a request of `step` is pooled."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(step.rows)

    def token_types(self, batch: InputBatch) -> torch.Tensor | None:
        """Return 1 for the tokens of the second texts of pairs, else 0: `[T]` int64, or None without pairs."""
        step = batch.step
        if self._second_starts.keys().isdisjoint(step.rows):
            return None
        types = np.zeros(len(batch.input_ids), np.int64)
        for i, row in enumerate(step.rows):
            if second := self._second_starts.get(row):
                types[batch.query_start_loc[i] + second : batch.query_start_loc[i + 1]] = 1
        return self.platform.to_device(types)

    def compute(self, batch: InputBatch, hidden: torch.Tensor) -> Pooled:
        """Return the vectors of the prompts that end in this step, from the hidden states `[T, H]` of its tokens."""
        step, pooler = batch.step, self.model.pooler
        ended: dict[PoolingParams, list[int]] = {}  # -> batch positions
        self._pending = {}
        for i, row in enumerate(step.rows):
            if row not in self.rows:
                continue
            start, count, first = step.num_computed[i], step.num_scheduled[i], batch.query_start_loc[i]
            state = self._states.get(row) if start else None
            self._pending[row] = pooler.update(state, hidden[first : first + count], start)
            if start + count == self.table.num_prompt_tokens[row]:
                ended.setdefault(self.rows[row], []).append(i)
        parts = []
        for params, positions in ended.items():
            if params.task == "token_classify":  # such a prompt is whole in its step
                starts = batch.query_start_loc
                parts += [([i], self._logits(hidden[starts[i] : starts[i + 1]])) for i in positions]
                continue
            rows = [step.rows[i] for i in positions]
            vectors = pooler.finish(
                [self._pending[row] for row in rows], [self.table.num_prompt_tokens[row] for row in rows]
            )
            parts.append((positions, self.platform.to_host(self._vectors(params, vectors))))
        return Pooled(parts)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens of a prompt in one row `[1, n * num_labels]`."""
        return self.platform.to_host(hidden.float().reshape(1, -1))

    def commit(self) -> None:
        """Record that the step of the last `compute` succeeded."""
        self._states |= self._pending
        self._pending = {}

    def _vectors(self, params: PoolingParams, pooled: torch.Tensor) -> torch.Tensor:
        """Map pooled hidden states `[P, H]` to the requested vectors `[P, D]`."""
        if params.task == "classify":
            return self.model.classify(pooled)
        vectors = self.model.pooler.dense(pooled)
        if params.num_dimensions:
            vectors = vectors[:, : params.num_dimensions]
        return F.normalize(vectors, dim=1) if params.normalize else vectors
