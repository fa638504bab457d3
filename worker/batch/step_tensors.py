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

    def metadata(
        self,
        backend: AttentionBackend,
        max_query_len: int,
        max_seq_len: int,
        host: tuple[list[int], list[int]] | None = None,
    ) -> GroupedMetadata:
        """Attention metadata of the step, one per cache group; `host` as in `AttentionMetadata`."""
        sizes = self.query_start_loc, self.seq_lens
        return tuple(
            AttentionMetadata(backend, slots, *sizes, table, max_query_len, max_seq_len, host=host)
            for slots, table in zip(self.slot_mappings, self.block_tables)
        )
