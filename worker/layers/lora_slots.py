"""Adapters in recorded steps (CUDA graphs): a recording reads which rows have which adapter, and where the matrices
are, from tensors that stay in place. Each of `num_slots` slots holds an adapter; a step says which rows use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.worker.layers.lora import Adapted, LinearLora, LoraWeights

PARTS = 8  # per layer, at most
# per adapter and layer: address of A, rank; per part address of B, first of its ranks, ranks, first column, columns
NUMBERS = 2 + 5 * PARTS


def weight_numbers(weights: LoraWeights) -> list[int]:
    """Return where an adapter's matrices for one layer are, for kernels."""
    numbers = [weights.a.data_ptr(), len(weights.a)]
    for ranks, columns, b in weights.parts:
        numbers += [b.data_ptr(), ranks.start, b.shape[1], columns.start, columns.stop - columns.start]
    return numbers + [0] * (NUMBERS - len(numbers))


@dataclass(slots=True)
class LayerSlots:
    """The adapters of one layer by slot: `table` int64 `[num_slots, NUMBERS]`, zeros for a slot without matrices;
    `most_rank` and `num_parts` bound those of an adapter.
    """

    table: torch.Tensor
    most_rank: int
    num_parts: int
    weights: list[LoraWeights | None] = field(default_factory=list)  # the contents of the table, for plain torch


class LoraSlots:
    """`rows` int64 `[num_slots, 3 + max_rows]`: addresses of a slot's row indices and of their float32 scales, their
    number, and the indices; `scales` `[num_slots, max_rows]`.
    """

    def __init__(
        self, layers: Sequence[LinearLora], num_slots: int, max_rows: int, max_rank: int, device: torch.device
    ):
        self.keys: list[str | None] = [None] * num_slots
        self.rows = torch.zeros(num_slots, 3 + max_rows, dtype=torch.int64, device=device)
        self.scales = torch.ones(num_slots, max_rows, device=device)
        self._places = np.array([[row[3:].data_ptr(), one.data_ptr()] for row, one in zip(self.rows, self.scales)])
        self._layers = list(layers)
        self._tables = torch.zeros(len(self._layers), num_slots, NUMBERS, dtype=torch.int64, device=device)
        for lora, table in zip(self._layers, self._tables):
            most = max_rank * lora.num_modules
            lora.slots = LayerSlots(table, most, min(lora.num_parts, PARTS), [None] * num_slots)

    def put(self, key: str, adapted: Adapted, to_device: Callable[[np.ndarray], torch.Tensor]) -> bool:
        """Give an adapter a slot. Returns False if none is free, or if some of its layers cannot be recorded."""
        places = {id(lora): i for i, lora in enumerate(self._layers)}
        weights = {places.get(id(layer.lora)): of_layer for layer, of_layer in adapted}
        if None in weights or None not in self.keys or any(len(one.parts) > PARTS for one in weights.values()):
            return False
        slot = self.keys.index(None)
        table = np.zeros((len(self._layers), NUMBERS), np.int64)
        for i, of_layer in weights.items():
            table[i] = weight_numbers(of_layer)
        for i, lora in enumerate(self._layers):
            lora.slots.weights[slot] = weights.get(i)
        self._tables[:, slot].copy_(to_device(table), non_blocking=True)
        self.keys[slot] = key
        return True

    def drop(self, key: str) -> None:
        """Free the slot of an adapter, if it has one."""
        if key in self.keys:
            self.keys[self.keys.index(key)] = None

    def fill(
        self,
        size: int,
        of_step: Iterable[tuple[str, list[int], list[float]]],
        to_device: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        """Set which of the `size` rows of the next replay use which adapter: (key, rows, scales)."""
        rows = np.zeros((len(self.keys), 3 + size), np.int64)
        scales = np.ones((len(self.keys), size), np.float32)
        rows[:, :2] = self._places
        for key, indices, factors in of_step:
            slot, count = self.keys.index(key), len(indices)
            rows[slot, 2], rows[slot, 3 : 3 + count], scales[slot, :count] = count, indices, factors
        self.rows[:, : 3 + size].copy_(to_device(rows), non_blocking=True)
        self.scales[:, :size].copy_(to_device(scales), non_blocking=True)


def add_lora_slots(x: torch.Tensor, out: torch.Tensor, slots: LoraSlots, layer: LayerSlots) -> None:
    """Add the products of the slots' adapters to `out` `[T, out]`, a layer's product of x `[T, in]`, in x's dtype or
    float32. Slots share no rows. Sums are float32.
    """
    for row, scales, weights in zip(slots.rows, slots.scales, layer.weights):
        count = int(row[2])
        if weights is None or not count:
            continue
        index = row[3 : 3 + count]
        inner = x[index].float() @ weights.a.float().t() * scales[:count, None]
        for ranks, columns, b in weights.parts:
            added = inner[:, ranks] @ b.float().t()
            out[index, columns] = (out[index, columns].float() + added).to(out.dtype)
