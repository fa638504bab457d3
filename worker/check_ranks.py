"""`--debug-check-ranks`: compare the tokens that the ranks of a tensor-parallel group sample, after every step. Without
it, ranks repeat each other's sampling and never compare results.
"""

from __future__ import annotations

import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.parallel import Group
from quire.worker.platforms.base import Platform
from quire.worker.sampling.sampler import Sampled, Sampler


class CheckedSampler(Sampler):
    """Sampler that raises RuntimeError if the ranks of `group` sample different tokens. Waits for the device in every
    step.
    """

    def __init__(self, table: RequestTable, platform: Platform, group: Group) -> None:
        super().__init__(table, platform)
        self.group = group

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        sampled = super().sample(logits, batch)
        by_rank = self.group.all_gather(sampled.token_ids[None], dim=0).tolist()
        if any(token_ids != by_rank[0] for token_ids in by_rank):
            raise RuntimeError(
                f"the tensor-parallel ranks sampled different tokens for rows {batch.rows} at positions "
                f"{batch.positions}: {by_rank}"
            )
        return sampled
