"""Runs the real `EngineCore` over the fake executor, with a fake socket of two lists: input from the test, output of
the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from quire.configs.config import Config
from quire.engine.chores.give_back import GiveBack
from quire.engine.core import EngineCore
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    Choice,
    EngineOutput,
    FromEngine,
    Hello,
    MediaItem,
    SamplingParams,
    StepOutputs,
    ToEngine,
)
from quire.engine.scheduler import Scheduler
from quire.worker.cache.tiers.base import Tier
from tests.helpers.engine.fake_executor import BACKEND, FakeExecutor, FakeOptions

T = TypeVar("T")

VOCAB = 1000
CLIENT = b"server"
SOON = 0.005  # seconds: an engine that sleeps for longer is idle


def fake_config(**settings: Any) -> Config:
    return Config.from_flat(distributed_executor_backend=BACKEND, **settings)


class Clock:
    """Replaces time.monotonic(), which only a waiting engine advances, and records the `timeouts` of its waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.timeouts = 1000.0, []
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def wait(self, timeout: float | None = None) -> list[int]:
        self.timeouts.append(timeout)
        self.now += timeout or 0.0
        return []


class Idle(Exception):
    """Raised when the engine would sleep."""


class LocalSocket:
    def __init__(self) -> None:
        self.inbox: list[tuple[bytes, ToEngine]] = []
        self.sent: list[tuple[bytes, FromEngine]] = []
        self.gone: set[bytes] = set()

    def watch(self, fd: int) -> None:
        raise AssertionError("the fake has no processes")

    def wait(self, timeout: float | None = None) -> list[int]:
        if not self.inbox and (timeout is None or timeout > SOON):
            raise Idle
        if not self.inbox:
            time.sleep(timeout)
        return []

    def receive(self) -> list[tuple[bytes, ToEngine]]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, client: bytes, message: FromEngine) -> bool:
        if client in self.gone:
            return False
        self.sent.append((client, message))
        return True


class Engine:
    """Drives an `EngineCore` turn by turn and collects each request's outputs."""

    def __init__(self, config: Config):
        self.socket = LocalSocket()
        self.core = EngineCore(config, self.socket)
        self.put(Hello())
        self.core.start()
        self.outputs: dict[tuple[bytes, str], list[EngineOutput]] = {}

    @property
    def scheduler(self):
        return self.core.scheduler

    def put(self, message: ToEngine, client: bytes = CLIENT) -> None:
        self.socket.inbox.append((client, message))

    def add(
        self,
        request_id: str,
        prompt: list[int],
        client: bytes = CLIENT,
        *,
        output_token_ids: list[int] | None = None,
        priority: int = 0,
        age: float = 0.0,
        cache_salt: str | None = None,
        siblings: list[Choice] | None = None,
        background: bool = False,
        media: list[MediaItem] | None = None,
        tenant: str = "",
        weight: float = 1.0,
        turn_start: int = 0,
        **sampling: Any,
    ) -> AddRequest:
        message = AddRequest(
            request_id,
            prompt,
            SamplingParams(**sampling),
            output_token_ids or [],
            age,
            priority,
            cache_salt,
            siblings or [],
            background,
            media=media or [],
            tenant=tenant,
            weight=weight,
            turn_start=turn_start,
        )
        self.put(message, client)
        return message

    def abort(self, *request_ids: str, client: bytes = CLIENT) -> None:
        self.put(AbortRequests(list(request_ids)), client)

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.core.executor.tiers.tiers if tier.name == name)

    def chore(self, kind: type[T]) -> T:
        (found,) = [chore for chore in self.core.chores if isinstance(chore, kind)]
        return found

    def call(self, method: str, *args: Any) -> Any:
        """Return the result of a call that is answered at once."""
        self.core.handle(CLIENT, Call(-1, method, list(args)))
        (found,) = [m for _, m in self.socket.sent if isinstance(m, CallResult) and m.call_id == -1]
        self.collect()
        assert found.error is None, found.error
        return found.value

    def give_back_in_every_turn(self, num_blocks: int) -> list[int]:
        """Let the machine lack the memory of `num_blocks` blocks whenever the engine checks, which is every turn with
        an INTERVAL of 0. Returns a list to which the returned blocks are appended.
        """
        given, executor = [], self.core.executor
        give_back_blocks = executor.give_back_blocks
        executor.memory_short = lambda: num_blocks  # a block of the fake has no size, which counts as 1
        executor.give_back_blocks = lambda blocks: (given.extend(blocks), give_back_blocks(blocks))
        self.core.chores.append(GiveBack(self.scheduler.kv, executor, self.core.ready.worker))
        return given

    def turn(self) -> None:
        """Run one turn of `EngineCore.run`. Raises Idle when the engine would sleep."""
        self.core.receive()
        self.core.step()
        self.collect()

    def run(self, after_turn: Callable[[], None] = lambda: None, max_turns: int = 10_000) -> None:
        """Run turns until no work is left."""
        for _ in range(max_turns):
            try:
                self.turn()
            except Idle:
                self.collect()
                return
            after_turn()
        raise AssertionError("the engine does not come to rest")

    def collect(self) -> None:
        sent, self.socket.sent = self.socket.sent, []
        for client, message in sent:
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    self.outputs.setdefault((client, output.request_id), []).append(output)

    def tokens(self, request_id: str, client: bytes = CLIENT) -> list[int]:
        return [token_id for output in self.outputs[client, request_id] for token_id in output.new_token_ids]

    def last(self, request_id: str, client: bytes = CLIENT) -> EngineOutput:
        return self.outputs[client, request_id][-1]

    def assert_at_rest(self) -> None:
        """Check that no request, row or block is held."""
        scheduler = self.scheduler
        assert (
            not scheduler.requests
            and not len(scheduler.running)
            and not len(scheduler.waiting)
            and not self.core.in_flight
        )
        assert (
            sorted(scheduler.free_rows) == list(range(len(scheduler.free_rows)))
            and len(scheduler.free_rows) == self.core.ready.worker.max_num_seqs
        )
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable and scheduler.kv.usage == 0
        assert scheduler.kv.reset_prefix_cache()
        assert not any(entry.holders for entry in scheduler.images._entries.values())


def assert_invariants(engine: Engine) -> None:
    """Check the invariants between two turns: every block is free or its reference count equals its holders, every row
    is free or owned once, queues are in order.
    """
    scheduler = engine.scheduler
    pool, held = scheduler.kv.pool, {}
    for request in scheduler.running:
        for block_id in [block_id for ids in request.block_ids for block_id in dict.fromkeys(ids) if block_id]:
            held[block_id] = held.get(block_id, 0) + 1
    assert {i: count for i, count in enumerate(pool.pages.num_refs) if count} == held
    free = list(pool.free_blocks)
    assert len(free) == len(set(free)) and set(free) == set(range(1, pool.num_usable + 1)) - held.keys()
    rows = [request.row for request in scheduler.running]
    assert sorted(rows + scheduler.free_rows) == list(range(engine.core.ready.worker.max_num_seqs))
    for queue in (scheduler.running, scheduler.waiting):
        keys = [request.key for request in queue]
        assert keys == sorted(set(keys))
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    for request in scheduler.waiting:
        assert request.row == -1 and not any(request.block_ids) and request.num_computed_tokens == 0


def greedy(max_tokens: int = 4, **sampling) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)


def make(enable_prefix_caching: bool = True, **settings) -> tuple[Scheduler, FakeExecutor]:
    config = fake_config(**settings)
    executor = FakeExecutor(config, FakeOptions())
    return Scheduler(
        config.scheduler,
        executor.ready,
        KVCacheManager(
            executor.ready.num_blocks,
            executor.ready.block_size,
            enable_prefix_caching,
            executor.ready.groups,
            executor.ready.max_num_batched_tokens,
        ),
    ), executor


def run_step(scheduler: Scheduler, executor: FakeExecutor):
    step = scheduler.schedule()
    return step, scheduler.update(step, executor.execute(step.input).result()).get(b"", [])
