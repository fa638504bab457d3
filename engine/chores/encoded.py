"""Records when images were encoded, for traces."""

from __future__ import annotations

from quire.engine.chores.base import Chore
from quire.engine.step import Step
from quire.worker.messages import WorkerCalls


class NoteEncoded(Chore):
    def __init__(self, workers: WorkerCalls):
        self._workers = workers

    def observe(self, step: Step) -> None:
        if step.input.encode:
            step.record_encoded(*self._workers.encoded())
