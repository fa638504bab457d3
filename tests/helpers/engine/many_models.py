"""Loads one model after another in a worker, so that a test of many models starts its processes only once."""

from __future__ import annotations

import msgspec

from quire.configs.config import Config
from quire.worker.messages import WorkerReady
from quire.worker.worker import Worker


class ManyModels:
    """Starts with the configuration's model; `load` replaces it. Steps run on the current model."""

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None):
        self.rank, self.world_size = rank, world_size
        self.worker = Worker(config, rank, world_size, init_method)

    def initialize(self, progress) -> WorkerReady:
        return self.worker.initialize(progress)

    def execute(self, step):
        return self.worker.execute(step)

    def load(self, config: dict, init_method: str) -> dict:
        self.worker.shutdown()
        self.worker = Worker(msgspec.convert(config, Config), self.rank, self.world_size, init_method)
        return msgspec.to_builtins(self.worker.initialize(lambda phase, fraction: None))

    def record_drafts(self) -> None:
        """Record the drafts of the drafting model, which the last rank may have, from now on: (tokens before, drafts).
        """
        if self.worker.runner.speculator is not None:
            self.seen, self.drafter = [], self.worker.runner.speculator.model
            self.make, self.drafter.draft = self.drafter.draft, self._draft

    def _draft(self, step, counts):
        drafts, table = self.make(step, counts), self.drafter.table.token_table
        self.seen += [(table[step.rows[i], : step.num_computed[i] + 1].tolist(), draft) for i, draft in drafts.items()]
        return drafts

    def recorded(self) -> list[tuple[list[int], list[int]]]:
        return getattr(self, "seen", [])

    def drift(self) -> None:
        """Make rank 1 sample other tokens than rank 0 from now on."""
        if self.rank == 1:
            sampler = self.worker.runner.sampler
            choose = sampler.choose
            sampler.choose = lambda *inputs: (choose(*inputs) + 1) % 500
