"""The adapters that a worker has: read from files when a request or the server needs them, kept in RAM, and on the
device for the steps that use them. A row state of the request table says which row uses which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from quire.checkpoints.lora import (
    DEFAULT_MAX_LORAS,
    check_counts,
    folders_at_start,
    max_rank,
    most_values,
    read_lora,
)
from quire.checkpoints.lora_files import LoraFiles
from quire.checkpoints.sizes import format_each
from quire.configs.serving import LoraConfig
from quire.worker.batch.input_batch import InputBatch
from quire.worker.layers.linear import Linear
from quire.worker.layers.lora import Adapted, LoraRows, StepLora
from quire.worker.layers.lora_slots import LoraSlots
from quire.worker.layers.moe_lora import ExpertProduct
from quire.worker.lora.reading import open_matrices, unswapped
from quire.worker.lora.targets import Piece, Targets, layer_weights
from quire.worker.messages import LoraUse, NewRequest, StepInput
from quire.worker.platforms.base import Platform

_BLANK_RANK = 16


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """The largest number and size of adapters."""

    max_rank: int
    max_active: int  # in a step
    max_loaded: int  # in RAM
    most_values: int = 0  # for an adapter at start

    @classmethod
    def from_config(cls, config: LoraConfig) -> LoraLimits:
        """Return the limits that `config` sets. Raises ValueError for wrong settings."""
        at_start = len(folders_at_start(config.lora_modules, config.lora_dir))
        max_active = config.max_loras or DEFAULT_MAX_LORAS
        check_counts(config.max_loras, config.max_cpu_loras)
        max_loaded = config.max_cpu_loras or max(max_active, at_start)
        rank = max_rank(config.max_lora_rank, config.lora_modules, config.lora_dir)
        return cls(rank, max_active, max_loaded, most_values(config.lora_modules, config.lora_dir))

    def num_bytes(self, targets: Targets, copies: int = 1) -> int:
        """Return bytes of `max_loaded` adapters in RAM and `max_active` in a step. Each has the largest LoRA rank in
        all layers of this rank, or the size of the largest adapter at start if that is more, because it has experts.
        Adapters of a step are packed for its kernels, in up to `copies` times their size, in addition to the copy in
        RAM.
        """
        return (self.max_loaded + copies * self.max_active) * self.adapter_bytes(targets)

    def adapter_bytes(self, targets: Targets) -> int:
        """Return bytes planned for an adapter."""
        return max(self.max_rank * targets.bytes_per_rank, self.most_values * targets.dtype.itemsize)


class Adapters:
    """Keeps at most `max_loaded` adapters of rank `max_rank` in RAM, and `max_active` of them in a step; the least
    recently used ones are dropped first. The adapters of a step's rows always stay.
    """

    def __init__(self, model: nn.Module, platform: Platform, limits: LoraLimits, fixed_order: bool = False):
        self.step = StepLora(fixed_order=fixed_order)
        self.targets = Targets(model, self.step)
        if hasattr(model, "model"):
            model.model.step_lora = self.step
        self.platform, self.max_rank = platform, limits.max_rank
        self.max_active, self.max_loaded = limits.max_active, limits.max_loaded
        self._most_bytes = self.max_loaded * limits.adapter_bytes(self.targets)  # for those in RAM
        self._bytes: dict[str, int] = {}
        self._loaded: OrderedDict[str, Adapted] = OrderedDict()  # in RAM, most recently used last
        self._active = self.step.active
        self._rows: dict[int, list[LoraUse]] = {}
        self._tokens: dict[str, tuple[list[int], list[float]]] = {}  # for the step, by adapter: indices and scales
        self._several: set[str] = set()  # adapters of rows with more than one
        self._slots: LoraSlots | None = None

    # ---- loading

    def load(self, key: str, folder: str) -> None:
        """Load the adapter `key` into RAM. Raises ValueError if it does not fit the model."""
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return
        adapted = self._read(read_lora(folder))
        size = sum(weights.nbytes for _, weights in adapted)
        if size > self._most_bytes:
            taken, most = format_each(size, self._most_bytes)
            raise ValueError(
                f"the adapter takes {taken}, more than the {most} planned for all: name one of its size at "
                "start (--lora-modules), or raise --max-cpu-loras"
            )
        self._loaded[key], self._bytes[key] = adapted, size
        self._drop_some(keep={key})

    def load_blank(self, key: str, experts: bool) -> None:
        """Put an adapter of zeros for all linear layers into RAM, for the warm-up; with `experts` also for those of one
        layer.
        """
        blank = self._blank(experts)
        self._loaded[key] = [(layer, layer_weights(pieces, self.targets.dtype)) for layer, pieces in blank]
        self._bytes[key] = sum(weights.nbytes for _, weights in self._loaded[key])

    def _blank(
        self, experts: bool
    ) -> Iterator[tuple[Linear | ExpertProduct, list[tuple[Piece, torch.Tensor, torch.Tensor]]]]:
        rank = min(self.max_rank, _BLANK_RANK)
        expert_pieces = self.targets.expert_pieces() if experts else {}
        for layer, pieces in (*self.targets.pieces_by_linear().items(), *expert_pieces.items()):
            matrices = []
            for piece in pieces:
                a, b = torch.zeros(rank, piece.in_features), torch.zeros(piece.out_features, rank)
                matrices.append((piece, a, b))
            yield layer, matrices

    def unload(self, key: str) -> None:
        """Forget an adapter, unless rows of requests use it: then it is dropped as others are."""
        if not any(use.key == key for uses in self._rows.values() for use in uses):
            self._forget(key)

    def _read(self, lora: LoraFiles) -> Adapted:
        found = self.targets.check(lora, self.max_rank)
        of_layer: dict[Linear | ExpertProduct, list[tuple[Piece, torch.Tensor, torch.Tensor]]] = {}
        with open_matrices(lora) as read:
            for module, pieces in found.items():
                if pieces:
                    matrices = lora.modules[module]
                    a, b = read(matrices.a, matrices.index), read(matrices.b, matrices.index) * matrices.scale
                    if matrices.swapped:
                        b = unswapped(b, self.targets.num_heads(module))
                    of_expert = {
                        piece.expert: piece.expert_matrices(a, b) for piece in pieces if piece.expert is not None
                    }
                    for piece in pieces:
                        both = of_expert.get(piece.expert, (a, b))
                        of_layer.setdefault(piece.layer, []).append((piece, *both))
        return [(layer, layer_weights(pieces, self.targets.dtype)) for layer, pieces in of_layer.items()]

    def _drop_some(self, keep: Iterable[str]) -> None:
        for key in [key for key in self._loaded if key not in keep]:
            if len(self._loaded) <= self.max_loaded and sum(self._bytes.values()) <= self._most_bytes:
                return
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._deactivate(key)
        self._loaded.pop(key, None)
        self._bytes.pop(key, None)

    # ---- rows

    def add(self, row: int, new: NewRequest) -> None:
        """Assign the request's adapters to `row`. Raises ValueError if one cannot be loaded."""
        for use in new.adapters:
            self.load(use.key, use.path)
        if new.adapters:
            self._rows[row] = new.adapters

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    # ---- steps

    def begin(self, step: StepInput, batch: InputBatch) -> bool:
        """Group the rows of a step by adapter, before its forward pass, and bring the adapters to the device. Returns
        whether any row has one; then call `place_rows`, or, to replay a recorded step, `fill_slots`.
        """
        self.step.rows = self.step.needed = []
        if not self._rows:
            return False
        tokens = self._tokens = {}
        self._several = {use.key for row in step.rows if len(uses := self._rows.get(row, ())) > 1 for use in uses}
        for i, row in enumerate(step.rows):
            for use in self._rows.get(row, ()):
                indices, scales = tokens.setdefault(use.key, ([], []))
                start, end = batch.query_start_loc[i], batch.query_start_loc[i + 1]
                indices += range(start, end)
                scales += [use.scale] * (end - start)
        if not tokens:
            return False
        self._activate({use.key: use.path for row in step.rows for use in self._rows.get(row, ())})
        return True

    def place_rows(self, batch: InputBatch) -> None:
        """Give the layers the rows of each adapter."""
        num_tokens = self.step.num_tokens = len(batch.input_ids)
        if self.step.fixed_order:  # of the adapters of a row, too
            self._tokens = dict(sorted(self._tokens.items()))
        self.step.rows = [self._group(key, *found, num_tokens) for key, found in self._tokens.items()]
        if batch.needed_rows is not None:
            places = {token: place for place, token in enumerate(self._needed(batch.step, batch))}
            for key, (indices, scales) in self._tokens.items():
                some = [(places[index], scale) for index, scale in zip(indices, scales) if index in places]
                if some:
                    self.step.needed.append(self._group(key, *map(list, zip(*some)), len(places)))

    # ---- recorded steps

    def use_slots(self, max_rows: int) -> None:
        """Prepare the recording of steps of up to `max_rows` rows of one token."""
        layers = [layer.lora for layer in self.targets.linears]
        self._slots = LoraSlots(layers, self.max_active, max_rows, self.max_rank, self.platform.device)

    @property
    def fit_slots(self) -> bool:
        """Return whether a recorded step can compute this one: no row has two adapters, and none has matrices for
        experts.
        """
        return not self._several and all(key in self._slots.keys for key in self._tokens)

    def fill_slots(self, size: int) -> None:
        """Tell the recorded step of `size` rows which of them use which adapter."""
        of_step = ((key, *found) for key, found in self._tokens.items())
        self._slots.fill(size, of_step, self.platform.to_device)

    @contextmanager
    def recording(self, size: int) -> Iterator[None]:
        """Let the layers read rows and adapters from slots inside this context. No recorded row has an adapter."""
        self._slots.fill(size, [], self.platform.to_device)
        self.step.recorded = self._slots
        try:
            yield
        finally:
            self.step.recorded = None

    @staticmethod
    def _needed(step: StepInput, batch: InputBatch) -> list[int]:
        """Return `batch.needed_rows`, which is on the device, as a list."""
        place = {row: batch.query_start_loc[i] - step.num_computed[i] for i, row in enumerate(step.rows)}
        sampling = batch.sampling
        return [place[row] + position - 1 for row, position in zip(sampling.rows, sampling.positions)] or [0]

    def _group(self, key: str, indices: list[int], scales: list[float], num_rows: int) -> LoraRows:
        to_device, of_rows = self.platform.to_device, None
        if any(scale != 1.0 for scale in scales):
            of_rows = to_device(np.array(scales, np.float32))
        index = to_device(np.array(indices, np.int64))
        return LoraRows(key, index, of_rows, len(indices) == num_rows, key in self._several)

    def _activate(self, needed: dict[str, str]) -> None:
        for key, folder in needed.items():
            self.load(key, folder)
        self._drop_some(keep=needed)
        for key in needed:
            if key not in self._active:
                device = self.platform.device
                self._active[key] = [(layer, weights.to(device)) for layer, weights in self._loaded[key]]
                for layer, weights in self._active[key]:
                    layer.lora.weights[key] = weights
                if self._slots is not None:
                    self._slots.put(key, self._active[key], self.platform.to_device)
            self._active.move_to_end(key)
        for key in [key for key in self._active if key not in needed]:
            if len(self._active) <= self.max_active:
                return
            self._deactivate(key)

    def _deactivate(self, key: str) -> None:
        if self._slots is not None:
            self._slots.drop(key)
        for layer, _ in self._active.pop(key, ()):
            layer.lora.weights.pop(key, None)
