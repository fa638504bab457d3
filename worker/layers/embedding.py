"""Token embedding and output head, their vocabulary split over the ranks.

The vocabulary is padded to a multiple of the ranks; padded rows are zero and their logits are cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from worker.layers.linear import PLAIN, Linear, LinearMethod, Part, empty_parameter
from worker.parallel import tp


def _vocab_parts(vocab_size: int, hidden_size: int, name: str) -> tuple[int, list[Part]]:
    """Rows per rank, and the part of checkpoint tensor `name` that this rank holds."""
    group = tp()
    rows = -(-vocab_size // group.size)
    start = group.rank * rows
    length = max(0, min(rows, vocab_size - start))
    return rows, [Part(name, (vocab_size, hidden_size), (0, min(start, vocab_size), length), (0, 0, length))]


def _zero_padding(weight: torch.Tensor, parts: list[Part]) -> None:
    weight.data[parts[0].target[2]:].zero_()


class VocabParallelEmbedding(nn.Module):
    """ids `[T]` -> `[T, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int, prefix: str):
        super().__init__()
        self.group = tp()
        rows, parts = _vocab_parts(vocab_size, hidden_size, f"{prefix}.weight")
        self.first_id, self.num_rows = self.group.rank * rows, rows
        self.weight = empty_parameter(rows, hidden_size, parts=parts)
        _zero_padding(self.weight, parts)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.first_id
        mine = (rows >= 0) & (rows < self.num_rows)
        embedded = F.embedding(rows * mine, self.weight) * mine.unsqueeze(-1)
        return self.group.all_reduce(embedded)


class ParallelLMHead(Linear):
    """hidden `[S, hidden_size]` -> float32 logits `[S, vocab_size]`, on every rank. With `tied_to` the weights are the embedding's.

    `name` is the checkpoint tensor: on a pipeline's last stage, tied weights without the embedding at hand are read from the embedding's tensor.
    """

    def __init__(self, vocab_size: int, hidden_size: int, name: str, tied_to: VocabParallelEmbedding | None = None, method: LinearMethod = PLAIN):
        self.group, self.vocab_size = tp(), vocab_size
        rows, self._parts = _vocab_parts(vocab_size, hidden_size, name)
        super().__init__(hidden_size, rows, False, method, weight=tied_to.weight if tied_to else None)
        if tied_to is None:
            _zero_padding(self.weight, self._parts)

    def weight_parts(self) -> list[Part]:
        return self._parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.group.all_gather(self.method.apply(self, x, None))
        return logits[..., :self.vocab_size].float()
