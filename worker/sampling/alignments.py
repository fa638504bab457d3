"""The parts of the audio to which tokens attend: cross-attention of prompts, collected as their chunks are computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.worker.attention.cross_weights import CrossWeights, RequestWeights
from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.images.step_audio import AudioRows
from quire.worker.messages import Alignment, NewRequest, StepInput
from quire.worker.parallel import tp
from quire.worker.platforms.base import Platform
from quire.worker.sampling.pooling import Pooled
from quire.worker.transformer.decoder import CausalLM


class Alignments:
    """A `RowState` in the place of `Pooling`, for models with cross-attention: the rows that ask for a matrix.

    A step that runs out of memory after `compute` is computed again, so its chunks count only from `commit` on.
    """

    def __init__(self, table: RequestTable, platform: Platform, model: CausalLM, audio: AudioRows) -> None:
        self.table, self.platform, self.audio = table, platform, audio
        self.group = tp()
        self.layers = [i for i, layer in enumerate(model.spec.layers) if layer.cross_length]
        self.num_heads = model.spec.layers[self.layers[0]].num_heads // self.group.size  # of this rank
        self.rows: dict[int, Alignment] = {}
        self._states: dict[int, list[torch.Tensor]] = {}
        self._pending: dict[int, list[torch.Tensor]] = {}

    def add(self, row: int, new: NewRequest) -> None:
        if new.pooling is not None and new.pooling.alignment is not None:
            self.rows[row] = new.pooling.alignment

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)
        self._states.pop(row, None)

    def needed(self, step: StepInput) -> bool:
        """Return whether a request of `step` asks for a matrix."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(step.rows)

    def weights(self, batch: InputBatch) -> CrossWeights:
        """Return the attention weights that the layers record in a step."""
        step, found = batch.step, []
        for i, row in enumerate(step.rows):
            if (wanted := self.rows.get(row)) is None:
                continue
            start, last = batch.query_start_loc[i : i + 2]
            first = min(start + max(wanted.first - step.num_computed[i], 0), last)
            _, slots = self.audio.rows[row]
            slots = self.platform.to_device(slots)
            found.append(RequestWeights(first, last, slots, self._own(wanted), wanted.positions))
        return CrossWeights(found)

    def compute(self, batch: InputBatch, hidden: torch.Tensor) -> Pooled:
        """Return the matrices `[tokens, positions]` of the prompts that end in this step."""
        step, noted = batch.step, iter(batch.cross_weights.requests)
        self._pending, parts = {}, []
        for i, row in enumerate(step.rows):
            if (wanted := self.rows.get(row)) is None:
                continue
            one = next(noted)
            empty = hidden.new_zeros(0, one.last - one.first, wanted.positions, dtype=torch.float32)
            before = self._states.get(row, []) if step.num_computed[i] else []
            self._pending[row] = [*before, torch.cat(one.found) if one.found else empty]
            if step.num_computed[i] + step.num_scheduled[i] == self.table.num_prompt_tokens[row]:
                matrix = self._finish(torch.cat(self._pending[row], 1), wanted)
                parts.append(([i], self.platform.to_host(matrix[None])))
        return Pooled(parts)

    def commit(self) -> None:
        """Keep the results of the last `compute`: its step succeeded."""
        self._states |= self._pending
        self._pending = {}

    def _own(self, wanted: Alignment) -> dict[int, list[int]]:
        """Return the heads of this rank, by layer."""
        own: dict[int, list[int]] = {}
        for layer, head in wanted.heads:
            rank, local = divmod(head, self.num_heads)
            if rank == self.group.rank:
                own.setdefault(self.layers[layer], []).append(local)
        return own

    def _finish(self, weights: torch.Tensor, wanted: Alignment) -> torch.Tensor:
        """Return the mean of all ranks' heads, `[tokens, positions]`, from the weights of this rank's."""
        deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
        even = ((weights - mean) / deviation).nan_to_num(0.0, 0.0, 0.0)
        total = smoothed(even, wanted.width).sum(0)
        if self.group.size > 1:
            total = self.group.all_reduce(total)
        return total / len(wanted.heads)


def smoothed(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the median of `width` neighbours along the last dimension, which is mirrored at its ends."""
    side = width // 2
    if x.shape[-1] <= side or not len(x):
        return x
    return F.pad(x, (side, side), mode="reflect").unfold(-1, width, 1).median(-1).values
