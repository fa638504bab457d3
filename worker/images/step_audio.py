"""The audio of requests whose decoder attends to the output of an encoder."""

from __future__ import annotations

import numpy as np
import torch

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.images.step_images import StepImages
from quire.worker.messages import CacheGroup, MediaItem, NewRequest, StepInput
from quire.worker.pipeline import SingleStage
from quire.worker.platforms.base import Platform
from quire.worker.transformer.calls import Encoded
from quire.worker.transformer.decoder import CausalLM


class AudioRows:
    """A `RowState`: the audio of each row, and the slots of its keys and values."""

    def __init__(self, groups: list[CacheGroup], block_size: int) -> None:
        (self.group,) = (g for g, group in enumerate(groups) if group.kind == "cross")
        self.length, self.block_size = groups[self.group].window, block_size
        self.rows: dict[int, tuple[MediaItem | None, np.ndarray]] = {}

    def add(self, row: int, new: NewRequest) -> None:
        blocks = np.asarray(new.block_ids[self.group], np.int64)
        slots = (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[: self.length]
        self.rows[row] = (new.media[0] if new.media else None), slots

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def beginning(self, step: StepInput) -> list[tuple[int, MediaItem | None, np.ndarray]]:
        """Return (batch position, audio, slots) of the requests whose first token a step computes."""
        starting = [(i, row) for i, (row, computed) in enumerate(zip(step.rows, step.num_computed)) if not computed]
        return [(i, *self.rows[row]) for i, row in starting if row in self.rows]


class StepAudio(StepImages):
    """Passes the encoder's output of requests that begin in a step to the layers, which keep its keys and values.

    A request without audio (the warm-up) attends to the keys and values of zeros, because its blocks may hold another
    request's audio.
    """

    def __init__(self, model: CausalLM, table: RequestTable, platform: Platform, stage: SingleStage) -> None:
        super().__init__(model, table, platform, stage)
        self.dtype, self.hidden_size = model.dtype, model.spec.hidden_size

    def make_rows(self) -> AudioRows:
        return AudioRows(list(self.table.groups), self.table.block_size)

    def errors(self, step: StepInput) -> dict[int, str]:
        if not self.failed:
            return {}
        starting = [(i, item.key) for i, item, _ in self.rows.beginning(step) if item is not None]
        return {i: f"the audio: {self.failed[key]}" for i, key in starting if key in self.failed}

    def prepare(self, batch: InputBatch) -> None:
        starting = self.rows.beginning(batch.step)
        if starting:
            hidden = torch.cat([self._output(item, len(slots)) for _, item, slots in starting])
            slots = self.platform.to_device(np.concatenate([slots for *_, slots in starting]))
            batch.encoded = Encoded(hidden, slots)

    def _output(self, item: MediaItem | None, length: int) -> torch.Tensor:
        if item is not None and item.key not in self.failed:
            return self.encoder.embeddings[item.key]
        return torch.zeros(length, self.hidden_size, dtype=self.dtype, device=self.platform.device)

    def uncut(self, step: StepInput) -> list[tuple[int, int]]:
        return []
