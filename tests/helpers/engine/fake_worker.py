"""Implements the worker's interface with the fake executor's arithmetic, for executors that run real workers."""

from __future__ import annotations

import os
import time

from quire.worker.messages import StepInput, StepOutput, WorkerReady
from tests.helpers.engine.fake_executor import FakeExecutor, FakeOptions


class FakeWorker:
    """Behaves as the model's name says: "bad-model" fails to load; with "crash-1" rank 1 exits in its third step,
    with "raise-1" it raises there.
    """

    def __init__(self, config, rank: int = 0, world_size: int = 1, init_method: str | None = None):
        assert (init_method is not None) == (world_size > 1)
        self.config, self.rank, self.world_size, self.init_method = config, rank, world_size, init_method
        self.fake = FakeExecutor(config, FakeOptions())
        self.stopped = False

    def initialize(self, progress) -> WorkerReady:
        if self.config.model.model == "bad-model":
            raise ValueError("bad-model has no weights")
        return self.fake.initialize(progress)

    def execute(self, step: StepInput):
        fault, _, rank = self.config.model.model.partition("-")
        if fault and step.step == 3:
            if self.rank != int(rank):
                time.sleep(0.7)  # ranks wait for each other
            elif fault == "crash":
                os._exit(9)
            elif fault == "raise":
                raise RuntimeError("no kernel for that")
        return self.fake.execute(step)

    def whoami(self, greeting: str) -> str:
        return f"{greeting} {self.rank} of {self.world_size}"

    def load_lora(self, key: str, folder: str) -> str:
        return f"rank {self.rank} has no {folder}" if key == str(self.rank) else ""

    def rendezvous(self) -> str:
        return self.init_method

    def shutdown(self) -> None:
        self.stopped = True


class LateResults(FakeWorker):
    """Computes only when the result is requested, so that a step launched too late is noticed."""

    launched = 0

    def execute(self, step: StepInput):
        pending, me = super().execute(step), self
        me.launched += 1

        class Late:
            def result(self) -> StepOutput:
                time.sleep(0.02)
                return pending.result()

        return Late()
