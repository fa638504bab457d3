"""Run the worker in the engine's process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any

from quire.configs.config import Config
from quire.engine.executor.base import Executor, Pending, ReportProgress, steps_in_flight
from quire.worker.messages import StepInput, StepOutput, WorkerReady
from quire.worker.worker import Worker


class UniprocExecutor(Executor):
    """Runs the worker inline if one step is in flight at a time, else in its own thread, so that the next step is
    scheduled meanwhile.
    """

    def __init__(self, config: Config):
        self._config = config
        self._worker = Worker(config)
        self._thread: ThreadPoolExecutor | None = None

    def initialize(self, progress: ReportProgress) -> WorkerReady:
        ready = self._worker.initialize(progress)
        if steps_in_flight(self._config, ready) > 1:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        return ready

    def execute(self, step: StepInput) -> Pending:
        if self._thread is None:
            return self._worker.execute(step)
        return _Launched(self._thread.submit(self._worker.execute, step))

    def call(self, method: str, *args: Any) -> Any:
        function = attrgetter(method)(self._worker)
        return function(*args) if self._thread is None else self._thread.submit(function, *args).result()

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.shutdown()


class _Launched:
    """A step submitted to the worker thread.

    The thread only launches it: waiting there for the device would delay the launch of the next step.
    """

    def __init__(self, launch: Future):
        self._launch = launch

    def result(self) -> StepOutput:
        return self._launch.result().result()
