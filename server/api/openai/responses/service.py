"""The responses of a server process: the store, with one thread that uses it, and the background responses."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.configs.serving import ServerConfig
from quire.server.api.openai.responses.background import Run
from quire.server.api.openai.responses.store import Store
from quire.server.errors import BadRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 1.0  # between checks for cancellations by other processes


class Responses:
    def __init__(self, config: ServerConfig, observe_evicted: Callable[[int], None] = lambda num: None):
        """Open the store. `observe_evicted` takes the number of evicted objects. Raises ValueError for a file that
        cannot be used.
        """
        path = config.responses_store
        # memory cannot be shared by several processes
        self.kept = path is not None or config.api_server_count == 1
        try:
            self.store = Store(path, config.responses_store_size)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--responses-store {path}: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._observe_evicted, self._num_observed = observe_evicted, 0
        self.runs: dict[str, Run] = {}  # by response id
        self._polling: asyncio.Task[None] | None = None

    def require_kept(self) -> None:
        """Raise BadRequest if nothing is stored."""
        if not self.kept:
            raise BadRequest(
                "Several frontends (--api-server-count) can only store responses in a file: start the server with "
                "--responses-store PATH, or send store false and the whole input.",
                param="store",
            )

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the result of a function that uses the store, in the store's thread."""
        result = await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        if (num := self.store.num_evicted) > self._num_observed:
            self._observe_evicted(num - self._num_observed)
            self._num_observed = num
        return result

    def start(self, run: Run, on_end: Callable[[], None]) -> None:
        """Run a response in the background."""

        def end() -> None:
            del self.runs[run.id]
            on_end()

        self.runs[run.id] = run
        run.start(end)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while self.runs:
            await asyncio.sleep(POLL_SECONDS)
            if not self.runs:
                return
            try:
                cancelled = await self.run(self.store.keep_alive, list(self.runs))
            except sqlite3.Error:
                logger.exception("the store of responses does not answer")
                continue
            for response_id in cancelled:
                if (run := self.runs.get(response_id)) is not None:
                    run.cancel()

    async def close(self) -> None:
        """Cancel running responses, and close the store."""
        if self._polling is not None:
            self._polling.cancel()
        for run in list(self.runs.values()):
            await run.interrupt("The server was shut down.")
        await self.run(self.store.close)
        self._thread.shutdown()
