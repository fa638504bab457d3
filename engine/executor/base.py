"""The interface between the engine and the processes that run its steps."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from quire.configs.config import Config
from quire.worker.messages import StepInput, StepOutput, WorkerReady

ReportProgress = Callable[[str, float], None]  # (phase, fraction of it)


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Raises if the step failed; the engine cannot continue after that."""


class Executor(ABC):
    """Runs steps in the order of `execute` calls. The constructor starts nothing; call `initialize` first."""

    @abstractmethod
    def initialize(self, progress: ReportProgress) -> WorkerReady:
        """Load the model and allocate the KV cache.

        `progress` is called in this thread. Raises ValueError for errors that the user can correct.
        """

    @abstractmethod
    def execute(self, step: StepInput) -> Pending:
        """Start a step without waiting for it."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call a method on every worker between steps and return the first worker's result."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and wait for them."""

    def kill(self) -> None:
        """Kill the worker processes, just before this process exits."""
        return

    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a worker dies, for the poll of an idle engine."""
        return []


def steps_in_flight(config: Config, ready: WorkerReady) -> int:
    """Number of steps scheduled before the first result is awaited: 1 is synchronous, 2 overlaps scheduling with the
    device.
    """
    return config.scheduler.steps_in_flight or ready.default_depth


_EXECUTORS = {
    "uniproc": "quire.engine.executor.uniproc:UniprocExecutor",
    "mp": "quire.engine.executor.multiproc:MultiprocExecutor",
    "ray": "quire.engine.executor.ray_cluster:RayExecutor",
    "fake": "quire.engine.executor.fake:FakeExecutor",
}


def get_executor(config: Config) -> Executor:
    """Create the executor that `distributed_executor_backend` names; the default is "mp" for several ranks, else
    "uniproc". Imports torch if the executor does.

    Raises ValueError for an unknown name.
    """
    world_size = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    name = config.parallel.distributed_executor_backend or ("uniproc" if world_size == 1 else "mp")
    if name not in _EXECUTORS:
        raise ValueError(f"distributed_executor_backend is {name!r}, but must be one of {', '.join(_EXECUTORS)}")
    if name == "uniproc" and world_size > 1:
        raise ValueError(
            f"distributed_executor_backend 'uniproc' runs one rank, but the configuration asks for {world_size}; "
            "use 'mp'"
        )
    module, _, cls = _EXECUTORS[name].partition(":")
    return getattr(importlib.import_module(module), cls)(config)
