"""Changes that images make to the inputs of a step: embeddings, positions, and attention in both directions."""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.worker.attention.image_spans import ImageSpan, SpanAttention
from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.images.encoder import ImageEncoder
from quire.worker.images.rows import ImageRows
from quire.worker.messages import StepInput
from quire.worker.parallel import tp
from quire.worker.pipeline import SingleStage
from quire.worker.platforms.base import Platform
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.vision.image_embeds import ImageEmbeds


class StepImages:
    """The images of a step, for a model with a `spec.vision`. The first stage encodes images; all stages need positions
    and attention.
    """

    def __init__(self, model: CausalLM, table: RequestTable, platform: Platform, stage: SingleStage) -> None:
        self.table, self.platform, self.stage = table, platform, stage
        self.vision, self.group = model.spec.vision, tp()
        self.rows = self.make_rows()
        table.register(self.rows)
        self.encoder = ImageEncoder(model.vision, platform) if model.vision is not None else None
        self.encoded = (0.0, 0.0)  # (begin, end) of the last time, by time.time()
        self.failed: dict[str, str] = {}  # key of an image that could not be encoded -> error

    def make_rows(self) -> ImageRows:
        """Create the row state that knows the images."""
        return ImageRows(self.vision)

    def encode(self, step: StepInput) -> None:
        """Drop and encode images as `step` asks, before `prepare`."""
        for key in step.evict:
            self.failed.pop(key, None)
        if self.encoder is not None:
            self.encoder.drop(step.evict)
        if step.encode:
            begun = time.time()
            errors = self.encoder.encode(step.encode) if self.encoder is not None else {}
            self._agree(step, errors)
            self.encoded = (begun, time.time())

    def _agree(self, step: StepInput, errors: dict[str, str]) -> None:
        """Let an image fail on all ranks if it failed on one: the ranks must compute the same, and the last stage
        answers. The host waits for the device here only with several ranks.
        """
        self.failed |= errors
        if self.group.size == 1 and self.stage.first and self.stage.last:
            return
        flags = torch.tensor([item.key in errors for item in step.encode], dtype=torch.int32).to(self.platform.device)
        if self.encoder is not None:
            flags = self.group.all_reduce(flags)
        for item, failed in zip(step.encode, self.stage.send_to_last(flags).tolist()):
            if failed:
                self.failed.setdefault(item.key, "it could not be read or encoded on another rank; see the log")

    def errors(self, step: StepInput) -> dict[int, str]:
        """Return errors of the requests, by batch position, whose chunks overlap an image that could not be encoded."""
        if not self.failed:
            return {}
        image = "the audio" if self.vision.audio else "image {} of the prompt"
        return {
            overlap.i: f"{image.format(overlap.image.number)}: {self.failed[overlap.image.item.key]}"
            for overlap in self.rows.overlaps(step)
            if overlap.image.item.key in self.failed
        }

    def prepare(self, batch: InputBatch) -> None:
        """Complete the inputs of a step whose images are encoded."""
        step = batch.step
        if (positions := self.rows.positions(step)) is not None:
            found = self.platform.to_device(positions)
            # one axis stays where recorded graphs read it
            batch.positions = batch.positions.copy_(found) if found.dim() == 1 else found
        overlaps = [overlap for overlap in self.rows.overlaps(step) if overlap.last > overlap.first]
        if overlaps and self.encoder is not None:
            batch.images = self._embeds(overlaps)
        if overlaps and self.vision.bidirectional:
            self._see_both_ways(batch, [ImageSpan(i, *run) for i, run in self._runs(step)])

    def _embeds(self, overlaps) -> ImageEmbeds | None:
        kept = self.encoder.embeddings
        found = [overlap for overlap in overlaps if overlap.image.item.key not in self.failed]
        if not found:
            return None
        rows = self.platform.to_device(np.concatenate([overlap.rows for overlap in found]))
        values = torch.cat([kept[one.image.item.key][one.first : one.last] for one in found])
        return ImageEmbeds(rows, values, self.vision.deep)

    def _runs(self, step: StepInput) -> list[tuple[int, tuple[int, int]]]:
        """Return neighbouring tokens of images, computed in this step, that attend to each other: (batch position,
        [start, stop) in the prompt).
        """
        return [
            (overlap.i, (start, stop))
            for overlap in self.rows.overlaps(step)
            for start, stop in overlap.image.runs()
            if start >= step.num_computed[overlap.i]
            and stop <= step.num_computed[overlap.i] + step.num_scheduled[overlap.i]
        ]

    def _see_both_ways(self, batch: InputBatch, spans: list[ImageSpan]) -> None:
        for group, meta in zip(self.table.groups, batch.attn):
            if not (self.vision.full_layers_causal and group.kind == "full"):
                meta.backend = SpanAttention(meta.backend, spans)

    def uncut(self, step: StepInput) -> list[tuple[int, int]]:
        """Return tokens of a step's first request, as [start, stop) in its chunk, that one forward pass must
        compute.
        """
        if not self.vision.bidirectional:
            return []
        computed = step.num_computed[0]
        return [(start - computed, stop - computed) for i, (start, stop) in self._runs(step) if i == 0]
