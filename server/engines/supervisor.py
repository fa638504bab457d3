"""Keeps an engine running: connects the client, detects deaths and hangs, restarts it, gives up if it keeps dying."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from quire.configs.config import Config
from quire.server.engines.process import EngineProcess
from quire.server.engines.remote import RemoteEngine
from quire.server.engines.silence import Silence

if TYPE_CHECKING:
    from quire.server.engines.client import EngineClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEATHS = 3
DEATH_WINDOW = 60.0  # seconds
START_RETRY = 5.0  # seconds before another attempt to start a process after an OSError
LEAVE_POLL = 0.5  # seconds between checks whether a draining engine has requests
WARM_UP_TIMES = 10  # times `step_timeout` for a warm-up step, in which many kernels may compile
STACKS_TIMEOUT = 1.0  # seconds for a hung engine to write its stacks


class EngineFailed(Exception):
    """The engine died at its first start, MAX_DEATHS times within DEATH_WINDOW without a request, or MAX_DEATHS times
    in a row before it was ready.
    """


class Supervisor:
    """`engine` is the first one, already started. `client` is connected to each engine and resubmits the open requests.
    `on_ready(again)` is called after each start, `on_death` after each death.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineProcess | RemoteEngine,
        client: EngineClient,
        on_ready: Callable[[bool], None],
        on_death: Callable[[], None],
    ):
        self.config, self.engine, self.client = config, engine, client
        self.on_ready, self.on_death = on_ready, on_death
        self.deaths: list[float] = []
        self.was_ready = False
        self.num_failed_starts = 0  # consecutive failed starts
        self.num_explained_deaths = 0  # of the client's explained deaths, those no longer in `deaths`
        self.hung: str | None = None  # reason for killing the current engine

    async def run(self) -> None:
        """Supervise successive engines until cancelled. Raises EngineFailed."""
        while True:
            ended = in_thread(self.engine.wait)
            await self._serve(ended)
            says, code = self.client.dead, ended.result()
            reason = self.hung or says or self.engine.describe_end(code)
            self.client.on_dead(reason)
            self.on_death()
            self.engine.kill()  # kill workers that outlived the engine
            follows = "another one is awaited"
            if not self.engine.is_remote:
                self._check_restarts(reason)
                follows = "restarting it; open requests will be resubmitted"
            elif says is not None and not self.was_ready:
                raise EngineFailed(f"engine {self.engine.index}, on another machine: {reason}")
            if self.engine.is_remote and self.client.is_leaving:
                logger.info("engine %d has left; %s", self.engine.index, follows)
            else:
                logger.error("engine %d died (%s); %s", self.engine.index, reason, follows)
            self.hung = None
            self.engine = await self._restart()

    async def _restart(self) -> EngineProcess | RemoteEngine:
        """Start a new engine. Retries after an OSError (no descriptors, memory or processes). Raises EngineFailed."""
        while True:
            engine = None
            try:
                engine = self.engine.successor()
                engine.start()
                return engine
            except OSError as error:
                if engine is not None:
                    engine.kill()
                self.num_failed_starts += 1
                if self.num_failed_starts > MAX_DEATHS:
                    raise EngineFailed(f"{error.strerror}; {MAX_DEATHS} restarts in a row failed") from error
                logger.error(
                    "engine %d cannot be started (%s); retrying in %g s", self.engine.index, error.strerror, START_RETRY
                )
                await asyncio.sleep(START_RETRY)

    async def _serve(self, ended: asyncio.Future[int]) -> None:
        """Connect to the engine and wait for its death."""
        patience = asyncio.ensure_future(self._end_waiting())
        try:
            address = self.engine.address or await in_thread(self.engine.locate)
        except asyncio.CancelledError:
            patience.cancel()
            raise
        await self.client.connect(address)
        watch = asyncio.gather(self._watch(), self._let_leave())
        try:
            await self._until_ready(ended)
            patience.cancel()
            await asyncio.wait({ended})
        finally:
            watch.cancel()
            patience.cancel()
            await asyncio.gather(watch, patience, return_exceptions=True)

    async def _let_leave(self) -> None:
        """Drain an engine that its machine is ending: send no new requests, and end it once it is idle."""
        if not self.engine.is_remote or not await in_thread(self.engine.wait_for_drain):
            return
        logger.info("engine %d leaves: its machine ends it", self.engine.index)
        self.client.on_leaving()
        num_idle = 0
        while num_idle < 2:  # frontends report their requests a little later
            await asyncio.sleep(LEAVE_POLL)
            num_idle = num_idle + 1 if self.client.is_idle else 0
        self.engine.ask_to_end()

    async def _end_waiting(self) -> None:
        """Fail requests that wait longer than `step_timeout` for an engine of another machine: it may never return."""
        timeout = self.config.server.step_timeout
        elsewhere = self.engine.is_remote or self.config.parallel.nnodes > 1
        if not elsewhere or not timeout or not self.was_ready:
            return
        while True:
            await asyncio.sleep(timeout)
            self.client.fail_open(f"the engine's machines were not together again after {timeout:g} s")

    async def _until_ready(self, ended: asyncio.Future[int]) -> None:
        ready = asyncio.ensure_future(self.client.wait_ready())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        if not ready.cancelled() and ready.exception() is None:
            again, self.was_ready, self.num_failed_starts = self.was_ready, True, 0
            self.on_ready(again)

    async def _watch(self) -> None:
        """Kill an engine with requests that is silent for `step_timeout` seconds; WARM_UP_TIMES as long in warm-up."""
        timeout, silence = self.config.server.step_timeout, Silence(self.client, self._is_busy)
        if not timeout:
            return
        times = WARM_UP_TIMES
        while silence.seconds < timeout * times:
            await asyncio.sleep(timeout / 20)
            silence.tick(timeout / 20)
            times = WARM_UP_TIMES if self.client.ready is None else 1
        longer = f"{times} times " if times > 1 else ""
        self.hung = f"it hung: no step ended for {longer}--step-timeout {timeout:g} seconds"
        logger.error("engine %d: %s; killing it", self.engine.index, self.hung)
        self.engine.dump_stacks()
        await asyncio.sleep(STACKS_TIMEOUT)
        for process, stacks in self.engine.stacks().items():
            logger.error(
                "the stacks of the threads of %s:\n%s",
                process,
                stacks or "none: the process is stopped or blocked in the kernel",
            )
        self.engine.kill()

    def _is_busy(self) -> bool:
        """Return whether the engine should be running steps. Loading has no limit: a disk may be arbitrarily slow."""
        if self.client.ready is None:
            return self.client.progress is not None and self.client.progress.phase == "warming up"
        return self.client.load > 0

    def _check_restarts(self, reason: str) -> None:
        now = time.monotonic()
        self.num_failed_starts += 1  # reset to 0 when the engine becomes ready
        explained = self.client.num_explained_deaths - self.num_explained_deaths
        self.num_explained_deaths += explained
        self.deaths = [death for death in self.deaths if now - death < DEATH_WINDOW] + [now]
        # Requests are suspected of such a death, and the client ends each one that kills engines.
        self.deaths = self.deaths[: max(len(self.deaths) - explained, 0)]
        if not self.was_ready:
            raise EngineFailed(reason)
        if len(self.deaths) >= MAX_DEATHS:
            raise EngineFailed(f"{reason}; it died {len(self.deaths)} times within {DEATH_WINDOW:.0f} seconds")
        if self.num_failed_starts > MAX_DEATHS:
            raise EngineFailed(f"{reason}; {MAX_DEATHS} restarts in a row failed")


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking function in a daemon thread, which, unlike an executor's, does not delay the process's exit."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        try:
            outcome = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return future
