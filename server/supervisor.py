"""Keeps an engine running behind the same HTTP port: starts it, notices its death, starts it again, and gives up when that does not help."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from configs.config import Config
from server.engine_process import EngineProcess

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATH_WINDOW = 60.0  # seconds


class EngineFailed(Exception):
    """The engine died at its first start, or MAX_DEATHS times within DEATH_WINDOW."""


class Supervisor:
    """`engine` is the first one, started already. `client` is told the address of each and sends it the open requests again; `on_ready` and `on_death` are
    called after each start and death."""

    def __init__(self, config: Config, engine: EngineProcess, client: Any, on_ready: Callable[[], None], on_death: Callable[[], None]):
        self.config, self.engine, self.client = config, engine, client
        self.on_ready, self.on_death = on_ready, on_death
        self.deaths: list[float] = []
        self.was_ready = False

    async def run(self) -> None:
        """Watch over engine after engine until cancelled. Raises EngineFailed."""
        while True:
            ended = in_thread(self.engine.wait)
            await self._serve(ended)
            reason = self.client.dead or _describe(ended.result())
            self.client.on_dead(reason)
            self.on_death()
            self.engine.kill()  # its workers, if any outlived it
            self._judge(reason)
            logger.error("the engine died (%s); starting a new one, which takes over the open requests", reason)
            self.engine = EngineProcess(self.config)
            self.engine.start()

    async def _serve(self, ended: asyncio.Future[int]) -> None:
        """From connecting to the engine's death."""
        await self.client.connect(self.engine.address)
        ready = asyncio.ensure_future(self.client.wait_ready())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        if not ready.cancelled() and ready.exception() is None:
            self.was_ready = True
            self.on_ready()
        await asyncio.wait({ended})

    def _judge(self, reason: str) -> None:
        now = time.monotonic()
        self.deaths = [death for death in self.deaths if now - death < DEATH_WINDOW] + [now]
        if not self.was_ready:
            raise EngineFailed(reason)
        if len(self.deaths) >= MAX_DEATHS:
            raise EngineFailed(f"{reason}; it died {len(self.deaths)} times within {DEATH_WINDOW:.0f} seconds")


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run a blocking function in a thread that does not keep the process from ending, unlike an executor's."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
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
