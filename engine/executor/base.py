"""The interface between the engine and the processes that run its steps."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol

from quire.configs.config import Config
from quire.engine.executor.stubs import stub
from quire.worker.host import torch_start
from quire.worker.messages import SlotCalls, StepInput, StepOutput, TierCalls, TransferCalls, WorkerCalls, WorkerReady

OF_ALL = {"load_lora"}  # calls that each rank may refuse for its own reason: see `first_reason`
ReportProgress = Callable[[str, float], None]  # (phase, fraction of it)


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Raises if the step failed; the engine cannot continue after that."""


def first_reason(answers: Iterable[str]) -> str:
    """Return the reason of the first rank that has one, "" if none has."""
    return next(filter(None, answers), "")


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
        """Call a method on every worker between steps. Returns the first worker's result, for a call in `OF_ALL`
        the first reason that a worker gives. `workers`, `tiers`, `slots` and `transfers` name the methods;
        "tiers.poll" is that of the worker's attribute `tiers`.
        """

    @cached_property
    def workers(self) -> WorkerCalls:
        return stub(WorkerCalls, self.call)

    @cached_property
    def tiers(self) -> TierCalls:
        return stub(TierCalls, lambda method, *args: self.call(f"tiers.{method}", *args))

    @cached_property
    def slots(self) -> SlotCalls:
        return stub(SlotCalls, lambda method, *args: self.call(f"slots.{method}", *args))

    @cached_property
    def transfers(self) -> TransferCalls:
        return stub(TransferCalls, lambda method, *args: self.call(f"transfers.{method}", *args))

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and wait for them."""

    def kill(self) -> None:
        """Kill the worker processes, just before this process exits."""
        return

    def sentinels(self) -> list[int]:
        """Return file descriptors that become readable when a worker dies, for the poll of an idle engine."""
        return []


def steps_in_flight(config: Config, ready: WorkerReady) -> int:
    """Return the number of steps scheduled before the first result is awaited: 1 is synchronous, 2 overlaps scheduling
    with the device.
    """
    return config.scheduler.steps_in_flight or ready.default_depth


_EXECUTORS = {
    "uniproc": "quire.engine.executor.uniproc:UniprocExecutor",
    "mp": "quire.engine.executor.multiproc:MultiprocExecutor",
    "ray": "quire.engine.executor.ray_cluster:RayExecutor",
}


def get_executor(config: Config) -> Executor:
    """Create the executor that `distributed_executor_backend` names. Raises ValueError as `executor_class`."""
    return executor_class(config)(config)


def executor_class(config: Config) -> Callable[[Config], Executor]:
    """Return the class that `distributed_executor_backend` names: "mp" by default for several ranks, else "uniproc".
    "MODULE:CLASS" names any other subclass of `Executor`. Imports torch if the executor does.

    Raises ValueError if there is no such executor, or if it cannot run the ranks.
    """
    name = config.parallel.executor
    if name == "uniproc" and config.parallel.world_size > 1:
        raise ValueError(
            "distributed_executor_backend 'uniproc' runs one rank, but the configuration asks for "
            f"{config.parallel.world_size}; use 'mp'"
        )
    return import_executor(name)


def import_executor(name: str) -> Callable[[Config], Executor]:
    """Return the class that a value of `distributed_executor_backend` names. Raises ValueError if there is none."""
    if name in _EXECUTORS:
        torch_start.postpone()
    module, colon, attribute = _EXECUTORS.get(name, name).partition(":")
    if not colon:
        raise ValueError(
            f"distributed_executor_backend is {name!r}, but must be one of {', '.join(_EXECUTORS)} or MODULE:CLASS"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if name in _EXECUTORS:
            raise
        raise ValueError(f"distributed_executor_backend {name!r} cannot be imported: {error}") from error
