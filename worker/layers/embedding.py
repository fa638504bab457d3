"""Token embedding and output head, with the vocabulary split over the ranks.

The vocabulary is padded to a multiple of the number of ranks. Padded rows are zero, and their logits are dropped.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.argmax import ArgmaxScreen
from quire.worker.layers.linear import (
    PLAIN,
    PLAIN_WEIGHTS,
    Linear,
    LinearMethod,
    Part,
    PlainLinear,
    WeightFormat,
    empty_parameter,
    product,
)
from quire.worker.parallel import tp


class ArgmaxPrefilter(Protocol):
    """Finds the argmax of an output head without computing all logits."""

    data: torch.Tensor  # data in addition to the head's weight

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return argmax of each row of the logits of x `[S, H]`, int64 `[S]`, or None if computing all logits is faster
        for this x.
        """


def _vocab_parts(vocab_size: int, hidden_size: int, name: str) -> tuple[int, list[Part]]:
    """Return (rows per rank, the part of checkpoint tensor `name` that this rank holds)."""
    group = tp()
    rows = -(-vocab_size // group.size)
    start = group.rank * rows
    length = max(0, min(rows, vocab_size - start))
    return rows, [Part(name, (vocab_size, hidden_size), ((0, min(start, vocab_size), length),), ((0, 0, length),))]


def _zero_padding(weight: torch.Tensor, parts: list[Part]) -> None:
    weight.data[parts[0].target[0][2] :].zero_()


class _Table(Linear):
    """The rows of an embedding in the format of the checkpoint."""

    def __init__(self, hidden_size: int, rows: int, parts: list[Part], method: LinearMethod):
        self.parts = parts
        super().__init__(hidden_size, rows, False, method)

    def weight_parts(self) -> list[Part]:
        return self.parts


class _SharedTable(LinearMethod):
    """Multiplies a tied head by the embedding's table."""

    fixed_order = True  # if the table's is

    def __init__(self, table: _Table):
        self.table = table

    def create_weights(self, layer: Linear) -> None:
        layer.weight = None

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.table.method.apply(self.table, x)

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        return self.table.method.apply_float32(self.table, x, workspace)

    def dense_weight(self, layer: Linear) -> torch.Tensor | None:
        return self.table.method.dense_weight(self.table)

    def num_bytes(self, layer: Linear) -> int:
        return 0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.method.rows(ids)


class VocabParallelEmbedding(nn.Module):
    """Maps ids `[T]` to `[T, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.group = tp()
        rows, parts = _vocab_parts(vocab_size, hidden_size, f"{prefix}.weight")
        self.first_id, self.num_rows = self.group.rank * rows, rows
        if stored := weights.embedding(prefix):
            self.table, self.weight = _Table(hidden_size, rows, parts, stored), None
            self.lookup = lambda rows: self.table.method.rows(rows)
        else:
            self.weight = empty_parameter(rows, hidden_size, parts=parts)
            _zero_padding(self.weight, parts)

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `[T]` of this rank's weights. A tied head that repacks the weights replaces this function."""
        return F.embedding(rows, self.weight)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self.lookup(input_ids)
        rows = input_ids - self.first_id
        mine = (rows >= 0) & (rows < self.num_rows)
        return self.group.all_reduce(self.lookup(rows * mine) * mine.unsqueeze(-1))


class WholeEmbedding(nn.Module):
    """Maps ids `[T]` to `[T, width]`, whole on every rank."""

    def __init__(self, num_rows: int, width: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.num_rows, parts = num_rows, [Part(f"{prefix}.weight", (num_rows, width))]
        self.table = self.weight = None
        if stored := weights.embedding(prefix):
            self.table = _Table(width, num_rows, parts, stored)
        else:
            self.weight = empty_parameter(num_rows, width, parts=parts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight) if self.table is None else self.table.method.rows(ids)


class PositionEmbedding(nn.Module):
    """Maps positions `[T]` to learned embeddings `[T, hidden_size]`; row `offset` is position 0. Replicated on all
    ranks.
    """

    def __init__(self, size: int, hidden_size: int, offset: int):
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, hidden_size), requires_grad=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset, self.weight)


class ParallelLMHead(Linear):
    """Maps hidden `[S, hidden_size]` to float32 logits `[S, vocab_size]`, on every rank, possibly in a workspace. With
    `tied_to` it shares the embedding's weights.

    `name` is the checkpoint tensor. On a pipeline's last stage without the embedding, tied weights are read from the
    embedding's tensor.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        name: str,
        tied_to: VocabParallelEmbedding | None = None,
        method: LinearMethod = PLAIN,
    ):
        self.group, self.vocab_size = tp(), vocab_size
        rows, self._parts = _vocab_parts(vocab_size, hidden_size, name)
        if tied_to and tied_to.weight is None:
            method = _SharedTable(tied_to.table)
        super().__init__(hidden_size, rows, False, method, weight=tied_to.weight if tied_to else None)
        self._tied_to = [tied_to] if tied_to else []  # in a list, so that it is not registered as a submodule
        self.prefilter: ArgmaxPrefilter | None = None
        self.screen: ArgmaxScreen | None = None  # replaces `prefilter` where torch multiplies
        if tied_to is None and self.weight is not None:
            _zero_padding(self.weight, self._parts)

    def weight_parts(self) -> list[Part]:
        return self._parts

    def finalize(self) -> None:
        super().finalize()
        self.screen = None
        if self.ops and self.prefilter is None and self.group.size == 1:
            self.prefilter = self.ops.argmax_prefilter(self)
            self.register_buffer("prefilter_data", self.prefilter and self.prefilter.data, persistent=False)
        for embedding in self._tied_to:
            if self.weight is None:  # repacked: the embedding also reads its rows from the new format
                embedding.weight, embedding.lookup = None, self.method.rows

    def forward(self, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        if self.group.size > 1 and isinstance(self.method, PlainLinear):  # gather in x's dtype: half the bytes
            logits = self.group.all_gather(self.method.apply(self, x)).float()
        else:
            logits = self.group.all_gather(self.method.apply_float32(self, x, workspace))
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]

    def rounded_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the logits in x's dtype, if torch multiplies them in it, else None."""
        if not isinstance(self.method, PlainLinear):
            return None
        return self.group.all_gather(self.method.apply(self, x))[..., : self.vocab_size]

    def abstain(self, num_rows: int) -> None:
        """Take part in the ranks' `forward` of `num_rows` rows with NaN instead of logits."""
        kept = self.method if self.weight is None else self.weight
        dtype = kept.dtype if isinstance(self.method, PlainLinear) else torch.float32
        device = next(tensor for tensor in (*self.parameters(), *self.buffers())).device
        self.group.all_gather(torch.full((num_rows, self.out_features), float("nan"), dtype=dtype, device=device))

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return argmax of each row of logits, int64 `[S]`, or None if computing all logits is faster."""
        if self.prefilter is not None:
            return self.prefilter.largest(x)
        if self.group.size > 1 or (weight := self.method.dense_weight(self)) is None:
            return None
        if self.screen is None:
            self.screen = ArgmaxScreen(weight, product)
        return self.screen.largest(x)
