"""Tests when the supervisor restarts an engine and when it gives up. Deaths are scripted: no processes or waits."""

from __future__ import annotations

import asyncio
import errno
import functools
import threading
from types import SimpleNamespace

import pytest

from quire.configs.config import Config
from quire.engine.messages import Progress, Ready
from quire.server.engines import supervisor as module
from quire.server.engines.client import EngineUnavailable
from quire.server.engines.process import describe_exit
from quire.server.engines.spawn import python_environment
from quire.server.engines.supervisor import EngineFailed, Supervisor
from tests.helpers.server.fake_engine import ready


class ScriptedEngine:
    """An engine process that ends when the test requests it."""

    is_remote = False

    def __init__(self, config: Config, index: int = 0):
        self.index, self.address = index, "ipc://nowhere"
        self._ended = threading.Event()
        made.append(self)

    def start(self) -> None:
        if failures:
            raise OSError(failures.pop(), "no room")

    def wait(self) -> int:
        self._ended.wait()
        return -9

    def kill(self) -> None:
        self._ended.set()

    def successor(self) -> ScriptedEngine:
        return ScriptedEngine(None, self.index)

    def dump_stacks(self) -> None:
        """It has none."""

    def stacks(self) -> dict[str, str]:
        return {}

    def describe_end(self, code: int) -> str:
        return describe_exit(code)


made: list[ScriptedEngine] = []
failures: list[int] = []  # of the next starts


class Client:
    """The part of `EngineClient` that a Supervisor uses."""

    def __init__(self):
        self.dead, self.num_messages, self.load, self.progress = None, 0, 0, None
        self.num_explained_deaths = 0
        self.connected = asyncio.Event()
        self.ready: Ready | None = None
        self._changed = asyncio.Event()

    async def connect(self, address: str) -> None:
        self.ready = self.dead = None
        self.connected.set()

    async def wait_ready(self) -> Ready:
        while self.ready is None:
            if self.dead is not None:
                raise EngineUnavailable(self.dead)
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    def on_dead(self, reason: str) -> None:
        self.ready = None

    def come_up(self) -> None:
        self.ready = ready()
        self._changed.set()


class Watched:
    """A running Supervisor: `await up()` and `await die()` control its current engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int = 0):
        monkeypatch.setattr(module, "EngineProcess", ScriptedEngine)
        self.ready: list[bool] = []  # for each start: whether it was a restart
        self.num_deaths = 0
        self.client = Client()
        self.supervisor = Supervisor(
            Config(), ScriptedEngine(Config(), index), self.client, self._on_ready, self._on_death
        )
        self.task = asyncio.create_task(self.supervisor.run())

    def _on_ready(self, again: bool) -> None:
        self.ready.append(again)

    def _on_death(self) -> None:
        self.num_deaths += 1

    async def up(self) -> None:
        await self.client.connected.wait()
        count = len(self.ready)
        self.client.come_up()
        while len(self.ready) == count:
            await asyncio.sleep(0.001)

    async def die(self) -> None:
        """End the engine; returns after it was replaced or given up."""
        await self.client.connected.wait()
        self.client.connected.clear()
        self.supervisor.engine.kill()
        connected = asyncio.create_task(self.client.connected.wait())
        await asyncio.wait({connected, self.task}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        connected.cancel()

    async def end(self) -> None:
        self.task.cancel()
        self.supervisor.engine.kill()
        await asyncio.gather(self.task, return_exceptions=True)


def asynchronous(test):
    """Run an async test to its end, at most 30 s."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


@pytest.fixture(autouse=True)
def _clean():
    made.clear()
    failures.clear()
    yield
    for engine in made:
        engine.kill()


@asynchronous
async def test_a_death_at_the_first_start_is_final(monkeypatch):
    watched = Watched(monkeypatch)
    await watched.die()
    with pytest.raises(EngineFailed, match=r"^signal SIGKILL$"):
        await watched.task
    assert len(made) == 1


@asynchronous
async def test_a_death_during_a_later_start_is_one_of_three(monkeypatch):
    """It is no death at start, which only the first engine can have.

    The second engine may die before it is ready, the third may not.
    """
    watched = Watched(monkeypatch)
    await watched.up()
    await watched.die()
    await watched.die()
    assert not watched.task.done() and len(made) == 3 and watched.num_deaths == 2
    await watched.up()
    await watched.die()
    with pytest.raises(EngineFailed, match="died 3 times within 60 seconds"):
        await watched.task


@asynchronous
async def test_each_engine_has_its_own_three(monkeypatch):
    """If each of several engines dies twice, all continue."""
    several = [Watched(monkeypatch, index) for index in range(3)]
    for watched in several:
        await watched.up()
    for _ in range(2):
        for watched in several:
            await watched.die()
            await watched.up()
    assert not any(watched.task.done() for watched in several) and [engine.index for engine in made].count(1) == 3
    assert all(watched.ready == [False, True, True] for watched in several)
    for watched in several:
        await watched.end()


@asynchronous
async def test_deaths_that_are_long_past_do_not_count(monkeypatch):
    watched, now = Watched(monkeypatch), 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(6):
        await watched.up()
        await watched.die()
        now += 31.0
    assert not watched.task.done()
    await watched.end()


@asynchronous
async def test_deaths_with_requests_do_not_count(monkeypatch):
    """The requests are ended one by one; only deaths of an idle engine end the server. A parent of several frontends
    learns of the requests after the death.
    """
    watched = Watched(monkeypatch)
    for number in range(8):
        await watched.up()
        if number % 2:
            watched.client.num_explained_deaths += 1
            await watched.die()
        else:
            await watched.die()
            watched.client.num_explained_deaths += 1
    assert not watched.task.done()
    for _ in range(3):
        await watched.up()
        await watched.die()
    with pytest.raises(EngineFailed, match="died 3 times within 60 seconds"):
        await watched.task


@asynchronous
async def test_three_starts_in_a_row_that_fail(monkeypatch):
    """They count at any distance in time.

    Covers tests that repeatedly kill an engine before it is ready while another engine serves.
    """
    monkeypatch.setattr(module, "DEATH_WINDOW", 0.0)
    watched = Watched(monkeypatch)
    await watched.up()
    for _ in range(3):  # the ready one, and two that did not become ready
        await watched.die()
    assert not watched.task.done()
    await watched.up()
    for _ in range(3):
        await watched.die()
    assert not watched.task.done()
    await watched.die()
    with pytest.raises(EngineFailed, match="3 restarts in a row failed"):
        await watched.task


@asynchronous
async def test_a_start_without_descriptors_or_memory_is_tried_again(monkeypatch):
    monkeypatch.setattr(module, "START_RETRY", 0.01)
    watched = Watched(monkeypatch)
    await watched.up()
    failures.extend([errno.EMFILE, errno.EAGAIN])
    await watched.die()
    assert not watched.task.done() and not failures and len(made) == 4
    await watched.up()
    await watched.end()


@asynchronous
async def test_a_start_without_room_for_a_folder_is_tried_again(monkeypatch):
    monkeypatch.setattr(module, "START_RETRY", 0.01)
    watched, successor = Watched(monkeypatch), ScriptedEngine.successor
    await watched.up()
    full = [errno.ENOSPC, errno.ENOSPC]

    def make(engine):
        if full:
            raise OSError(full.pop(), "no room")
        return successor(engine)

    monkeypatch.setattr(ScriptedEngine, "successor", make)
    await watched.die()
    assert not watched.task.done() and not full and len(made) == 2
    await watched.up()
    await watched.end()


@asynchronous
async def test_starts_without_room_are_given_up(monkeypatch):
    monkeypatch.setattr(module, "START_RETRY", 0.01)
    watched = Watched(monkeypatch)
    await watched.up()
    failures.extend([errno.ENOMEM] * 10)
    await watched.die()
    with pytest.raises(EngineFailed, match="no room; 3 restarts in a row failed"):
        await watched.task


@pytest.mark.parametrize(
    "is_ready, reports, reason",
    [(True, 0, "--step-timeout 300"), (False, 0, "10 times --step-timeout 300"), (False, 20, "10 times --step")],
)
def test_an_engine_that_compiles_is_not_hung(is_ready, reports, reason, monkeypatch):
    """A step of the warm-up may take ten times as long, from each report of its progress on."""
    client, waited = Client(), []
    client.progress, client.ready, client.load = Progress("warming up", 0.0), ready() if is_ready else None, 1

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        client.num_messages += len(waited) % 200 == 0 and len(waited) <= 200 * reports

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    supervisor = Supervisor(Config(), ScriptedEngine(Config()), client, lambda again: None, lambda: None)
    asyncio.run(supervisor._watch())
    limit = 300 if is_ready else 3000 * (1 + reports)
    assert reason in supervisor.hung and limit <= sum(waited) <= limit + 40


def test_threads_of_torch_do_not_spin_in_engines(monkeypatch):
    """They would hold the cores of the native kernels' threads. A user's own setting is kept."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert python_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert python_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
