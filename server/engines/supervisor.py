"""Keeps an engine running behind the same HTTP port: starts it, notices its death, starts it again, and gives up when
that does not help.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from quire.configs.config import Config
from quire.server.engines.process import EngineProcess
from quire.server.engines.silence import Silence

if TYPE_CHECKING:
    from quire.server.engines.client import EngineClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEATHS = 3
DEATH_WINDOW = 60.0  # seconds
START_RETRY = 5.0  # seconds between attempts to start a process for which the system has no room
STACKS_TIMEOUT = 1.0  # seconds that a hung engine gets to write its stacks


class EngineFailed(Exception):
    """The engine died at its first start, MAX_DEATHS times within DEATH_WINDOW, or MAX_DEATHS times in a row before it
    was ready.
    """


class Supervisor:
    """`engine` is the first one, started already. `client` is told the address of each and sends it the open requests
    again; `on_ready`, with whether there was one before, and `on_death` are called after each start and death.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineProcess,
        client: EngineClient,
        on_ready: Callable[[bool], None],
        on_death: Callable[[], None],
    ):
        self.config, self.engine, self.client = config, engine, client
        self.on_ready, self.on_death = on_ready, on_death
        self.deaths: list[float] = []
        self.was_ready = False
        self.num_failed_starts = 0  # in a row
        self.num_trial_deaths = 0  # of the client's that do not count any more
        self.hung: str | None = None  # why the present engine is being killed

    async def run(self) -> None:
        """Watch over engine after engine until cancelled. Raises EngineFailed."""
        while True:
            ended = in_thread(self.engine.wait)
            await self._serve(ended)
            reason = self.hung or self.client.dead or describe_exit(ended.result())
            self.client.on_dead(reason)
            self.on_death()
            self.engine.kill()  # its workers, if any outlived it
            self._judge(reason)
            logger.error("the engine died (%s); starting a new one, which takes over the open requests", reason)
            self.hung = None
            self.engine = await self._start_another()

    async def _start_another(self) -> EngineProcess:
        """Raises EngineFailed when the system has no descriptors, memory or processes for it, try after try."""
        while True:
            engine = EngineProcess(self.config, self.engine.index)
            try:
                engine.start()
                return engine
            except OSError as error:
                engine.kill()
                self.num_failed_starts += 1
                if self.num_failed_starts > MAX_DEATHS:
                    raise EngineFailed(
                        f"{error.strerror}; it could not be started again {MAX_DEATHS} times in a row"
                    ) from error
                logger.error("the engine cannot be started (%s); trying again in %g s", error.strerror, START_RETRY)
                await asyncio.sleep(START_RETRY)

    async def _serve(self, ended: asyncio.Future[int]) -> None:
        """From connecting to the engine's death."""
        await self.client.connect(self.engine.address)
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._until_ready(ended)
            await asyncio.wait({ended})
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

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
        """Kill an engine that has something to do and says nothing for `step_timeout` seconds."""
        timeout, silence = self.config.server.step_timeout, Silence(self.client, self._is_busy)
        if not timeout:
            return
        while silence.seconds < timeout:
            await asyncio.sleep(timeout / 20)
            silence.tick(timeout / 20)
        self.hung = f"it hung: no step ended for --step-timeout {timeout:g} seconds"
        logger.error("the engine is to be killed, %s", self.hung)
        self.engine.dump_stacks()
        await asyncio.sleep(STACKS_TIMEOUT)
        for process, stacks in self.engine.stacks().items():
            logger.error(
                "the stacks of the threads of %s:\n%s", process, stacks or "none: it is stopped, or waits in the kernel"
            )
        self.engine.kill()

    def _is_busy(self) -> bool:
        """Whether the engine should be running steps. Loading has no limit: a disk may be arbitrarily slow."""
        if self.client.ready is None:
            return self.client.progress is not None and self.client.progress.phase == "warming up"
        return self.client.load > 0

    def _judge(self, reason: str) -> None:
        now = time.monotonic()
        self.num_failed_starts += 1  # unless it was ready, which set this to 0
        explained, self.num_trial_deaths = (
            self.client.num_trial_deaths - self.num_trial_deaths,
            self.client.num_trial_deaths,
        )
        self.deaths = [death for death in self.deaths if now - death < DEATH_WINDOW] + [now]
        # a request is to blame, which the client is about to find
        self.deaths = self.deaths[: len(self.deaths) - explained]
        if not self.was_ready:
            raise EngineFailed(reason)
        if len(self.deaths) >= MAX_DEATHS:
            raise EngineFailed(f"{reason}; it died {len(self.deaths)} times within {DEATH_WINDOW:.0f} seconds")
        if self.num_failed_starts > MAX_DEATHS:
            raise EngineFailed(f"{reason}; it could not be started again {MAX_DEATHS} times in a row")


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking function in a thread that does not keep the process from ending, unlike an executor's."""
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
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, and nobody waits
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return future
