"""Runs the open batches: validates their input, sends their lines through the server's own routes as background
requests, and writes the output files.

One process runs the batches of a folder: the one that holds its lock. A line counts as done when its result is in the
database; what was running when the process ended runs again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.server.batches.lines import read_body, read_lines
from quire.server.batches.store import Batch, Line, Store
from quire.server.errors import error_body
from quire.server.http import in_process
from quire.server.http.sse import one_line

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire.server.state import ServerState

logger = logging.getLogger("quire.batches")

T = TypeVar("T")

POLL_SECONDS = 1.0  # between looks at batches that other processes add and cancel
RETRY_SECONDS = 1.0  # after an answer that says that the server is busy
MAX_RUNNING = 256  # lines at once, whatever the engine could take
_EXPIRED = b'{"code":"batch_expired","message":"The completion window ended before this request ran."}'
_CANCELLED = b'{"code":"batch_cancelled","message":"The batch was cancelled before this request ran."}'
_FULL = b'{"code":"storage_full","message":"The space for results ran out before this request ran (--batch-disk)."}'


class Batches:
    """The store of a server process, with one thread that uses it, and the runner if this process holds the lock."""

    def __init__(self, folder: str, max_bytes: int, state: ServerState):
        """Raises ValueError for a folder that cannot be used."""
        try:
            self.store = Store(folder, max_bytes)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--batch-dir {folder}: {error}") from None
        self.state = state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._changed = asyncio.Event()
        self.active: dict[str, asyncio.Task[None]] = {}  # by batch id

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function that uses the store, in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def notify(self) -> None:
        """A batch was added or cancelled."""
        self._changed.set()

    async def serve(self, app: ASGIApp) -> None:
        """Run batches until cancelled, once no other process does."""
        lock = os.open(self.store.folder / "runner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(lock):
                await asyncio.sleep(POLL_SECONDS)
            await self._run_batches(app)
        finally:
            os.close(lock)

    async def _run_batches(self, app: ASGIApp) -> None:
        """All open batches run side by side, with equal numbers of lines."""
        try:
            while True:
                self._changed.clear()
                for batch in await self.run(self.store.open_batches):
                    if batch.id not in self.active:
                        self.active[batch.id] = asyncio.create_task(self._run_one(app, batch))
                await self.wait(POLL_SECONDS)
        finally:
            tasks = list(self.active.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(self, app: ASGIApp, batch: Batch) -> None:
        try:
            await _Run(self, app, batch).run()
        except (OSError, sqlite3.Error):
            logger.exception("%s could not continue; it is tried again", batch.id)
            await asyncio.sleep(POLL_SECONDS)
        finally:
            del self.active[batch.id]

    async def wait(self, seconds: float) -> None:
        """Until something changed, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        await self.run(self.store.close)
        self._thread.shutdown()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass
class _Run:
    """One batch, from the status it has until it ends, or until the server drains."""

    batches: Batches
    app: ASGIApp
    batch: Batch
    running: set[asyncio.Task[None]] = field(default_factory=set)
    retries: list[Line] = field(default_factory=list)
    last: int = 0  # number of the last line that was begun
    no_space: bool = False

    @property
    def store(self) -> Store:
        return self.batches.store

    async def run(self) -> None:
        if self.batch.status == "validating":
            await self._validate()
        try:
            end, unfinished = await self._run_lines()
        finally:
            running = list(self.running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if end is None:
            return
        if end == "completed":
            await self._do(self.store.set_status, self.batch.id, "finalizing")
        await self._do(self.store.finish, self.batch.id, end, unfinished)
        batch = await self._do(self.store.batch, self.batch.id)
        logger.info("%s %s: %d of %d requests succeeded", batch.id, batch.status, batch.completed, batch.total)

    async def _do(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self.batches.run(function, *arguments)

    async def _validate(self) -> None:
        lines, errors = await asyncio.to_thread(
            read_lines, self.store.path(self.batch.input_file_id), self.batch.endpoint
        )
        if errors:
            await self._do(lambda: self.store.set_status(self.batch.id, "failed", errors=errors))
        else:
            await self._do(self.store.begin, self.batch.id, lines)

    async def _run_lines(self) -> tuple[str | None, bytes | None]:
        """(the status that the batch ends with, the error of lines that did not run); (None, None) if it goes on when
        the server runs again, or has ended already.
        """
        while True:
            self.batch = await self._do(self.store.batch, self.batch.id)
            if self.batch.status == "cancelling":
                return "cancelled", _CANCELLED
            if self.batch.status == "finalizing":  # if lines are missing, because the space ran out
                return "completed", _FULL
            if self.batch.status != "in_progress":
                return None, None
            if self.batch.expires_at <= time.time():
                return "expired", _EXPIRED
            if self.no_space:
                return "completed", _FULL
            if self.batches.state.draining or self.batches.state.failure is not None:
                await asyncio.sleep(POLL_SECONDS)
                return None, None
            if await self._begin_lines() == 0 and not self.running:
                return "completed", None
            await self._wait_for_one()

    async def _begin_lines(self) -> int:
        """Begin as many lines as the engine can run; returns the number of lines that are running or could."""
        ready = self.batches.state.ready
        share = 0 if ready is None else min(ready.worker.max_num_seqs, MAX_RUNNING) // len(self.batches.active)
        room = max(share, 1) - len(self.running) if ready is not None else 0
        if room <= 0:
            return 1
        lines, self.retries = self.retries[:room], self.retries[room:]
        if len(lines) < room:
            lines += await self._do(self.store.missing_lines, self.batch.id, self.last, room - len(lines))
        for line in lines:
            self.last = max(self.last, line.number)
            task = asyncio.create_task(self._run_line(line))
            self.running.add(task)
        return len(lines)

    async def _wait_for_one(self) -> None:
        if not self.running:
            await self.batches.wait(POLL_SECONDS)
            return
        done, self.running = await asyncio.wait(self.running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _run_line(self, line: Line) -> None:
        body = await asyncio.to_thread(read_body, self.store.path(self.batch.input_file_id), line)
        number = f"{self.batch.id.removeprefix('batch_')}_{line.number}"
        scope = {"owner": self.batch.owner, "tenant": self.batch.tenant, "background": True}
        if b'"stream"' in body and msgspec.json.decode(body).get("stream"):
            status, request_id = 400, number
            answer = error_body("stream is not available in batches.", "invalid_request_error", "stream")
        else:
            status, request_id, answer = await in_process.call(self.app, self.batch.endpoint, body, scope)
        if status == 503:  # loading, restarting or draining
            await asyncio.sleep(RETRY_SECONDS)
            self.retries.append(line)
            return
        result = one_line(
            b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}'
            % (
                msgspec.json.encode(f"batch_req_{number}"),
                msgspec.json.encode(line.custom_id),
                status,
                msgspec.json.encode(request_id),
                answer,
            )
        )
        if not await self._do(self.store.add_result, self.batch.id, line.number, result, status == 200):
            self.no_space = True
