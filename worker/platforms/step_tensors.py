"""The tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.attention.base import AttentionBackend, AttentionMetadata, GroupedMetadata


@dataclass(slots=True)
class StepTensors:
    """The inputs of a forward pass of R requests and T tokens: views of the beginning of the buffers."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    slot_mappings: torch.Tensor  # [G, T] int64, one row per cache group
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    block_tables: torch.Tensor  # [G, R, K] int32, one table per cache group

    def without_padding(self, num_reqs: int) -> StepTensors:
        """Return the views of the first `num_reqs` requests; each of the others is one token of padding."""
        last = len(self.positions) - (len(self.seq_lens) - num_reqs)
        tokens = self.input_ids[:last], self.positions[:last], self.slot_mappings[:, :last]
        return StepTensors(
            *tokens, self.query_start_loc[: num_reqs + 1], self.seq_lens[:num_reqs], self.block_tables[:, :num_reqs]
        )

    def pad(self, num_reqs: int) -> None:
        """Fill the rows from `num_reqs` on with requests of one token, token 0 at position 0, in the null block. They
        read states from the null page and write them to it.
        """
        extra = len(self.seq_lens) - num_reqs
        if not extra:
            return
        first = len(self.positions) - extra
        for tensor in (self.input_ids, self.positions, *self.slot_mappings):
            tensor[first:].zero_()
        self.seq_lens[num_reqs:].fill_(1)
        self.block_tables[:, num_reqs:, :2].zero_()
        starts = self.query_start_loc[num_reqs + 1 :]
        torch.arange(first + 1, first + extra + 1, dtype=starts.dtype, device=starts.device, out=starts)

    def metadata(
        self,
        backend: AttentionBackend,
        max_query_len: int,
        max_seq_len: int,
        host: tuple[list[int], list[int]] | None = None,
    ) -> GroupedMetadata:
        """Return the step's attention metadata, one per cache group; `host` is as in `AttentionMetadata`."""
        sizes = self.query_start_loc, self.seq_lens
        return tuple(
            AttentionMetadata(backend, slots, *sizes, table, max_query_len, max_seq_len, host=host)
            for slots, table in zip(self.slot_mappings, self.block_tables)
        )
