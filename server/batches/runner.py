"""Runs the open batches: validates their input, sends their lines through the server's own routes as background
requests, and writes the output files.

One process runs the batches of a folder: the one that holds its lock. A line counts as done when its result is in the
database; a batch that was running when the process ended runs again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

import msgspec

from quire.server.batches.disk import is_full
from quire.server.batches.lines import read_body, read_lines
from quire.server.batches.store import Batch, File, Line, Store
from quire.server.error_shapes import body_of, internal_body
from quire.server.errors import BadRequest
from quire.server.http import in_process
from quire.server.http.sse import one_line
from quire.server.keys.caller import Caller
from quire.server.turns.threads import LARGE, SMALL

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire.configs.config import Config
    from quire.server.turns.threads import Threads

logger = logging.getLogger("quire.batches")

T = TypeVar("T")

POLL_SECONDS = 1.0  # between looks at batches that other processes add and cancel
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # after a failure: doubled with each one
# for a line that a ready server answers by 503, and for a batch that cannot be read or written: more than five minutes
MAX_ATTEMPTS = 10
MAX_RUNNING = 256  # lines at once, whatever the engine could take
_EXPIRED = b'{"code":"batch_expired","message":"The completion window ended before this request ran."}'
_CANCELLED = b'{"code":"batch_cancelled","message":"The batch was cancelled before this request ran."}'
_FULL = b'{"code":"storage_full","message":"The space for results ran out before this request ran (--batch-disk)."}'


class Host(Protocol):
    """The server that lines of batches are sent through."""

    config: Config
    threads: Threads
    draining: bool
    failure: str | None
    status: str

    @property
    def num_rows(self) -> int: ...


class Batches:
    """The store of a server process, with one thread that uses it, and the runner if this process holds the lock."""

    def __init__(self, folder: str, max_bytes: int, state: Host):
        """Raise ValueError for a folder that cannot be used."""
        try:
            self.store = Store(folder, max_bytes, several=_is_shared(state))
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--batch-dir {folder}: {getattr(error, 'strerror', None) or error}") from None
        self.state = state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._changed = asyncio.Event()
        self.active: dict[str, asyncio.Task[None]] = {}  # by batch id
        self._failures: dict[str, int] = {}  # in a row, by batch id

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the result of a function that uses the store, in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def add_file(
        self, content: BinaryIO, caller: Caller, purpose: str, filename: str, seconds: int | None, held: int = 0
    ) -> File:
        """Store a file of a request, which expires after `seconds`; `held` bytes are reserved for it already. Raises
        BadRequest, InsufficientStorage.
        """
        owner, size = caller.owner or "", content.seek(0, os.SEEK_END)
        if not held:
            await self.run(self.store.hold, size, owner)
        try:
            part = await self.state.threads.run(LARGE, lambda: self.store.write(content), caller.turn)
            return await self.run(self.store.keep, part, owner, purpose, filename, seconds)
        finally:
            if not held:
                self.store.release(size, owner)

    async def run_steps(self, steps: Iterator[None]) -> None:
        """Run all `steps` of a change of the store, between which others use it."""
        while await self.run(next, steps, self) is not self:
            pass

    def notify(self) -> None:
        """Take note of a batch that was added or cancelled."""
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
        """Run all open batches side by side, with equal numbers of lines."""
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
            self._failures.pop(batch.id, None)
        except Exception as error:
            await self._try_later(batch, error)
        finally:
            del self.active[batch.id]

    async def _try_later(self, batch: Batch, error: Exception) -> None:
        """Wait after an error that is not a line's own, or end the batch after too many of them."""
        failures = self._failures[batch.id] = self._failures.get(batch.id, 0) + 1
        logger.error("%s could not continue (attempt %d of %d)", batch.id, failures, MAX_ATTEMPTS, exc_info=error)
        # results are not given up while there is hope for space
        if failures >= MAX_ATTEMPTS and (not is_full(error) or batch.expires_at <= time.time()):
            what = "the server's disk is full" if is_full(error) else "the server failed to read or store its data"
            problem = {"code": "internal_error", "line": None, "message": f"The batch ended: {what}.", "param": None}
            try:
                await self.run_steps(self.store.fail(batch.id, [problem]))
                del self._failures[batch.id]
                return
            except (OSError, sqlite3.Error):  # it cannot be written that it failed, so it stays open
                logger.exception("%s could not be ended", batch.id)
        await asyncio.sleep(retry_seconds(failures))

    async def wait(self, seconds: float) -> None:
        """Wait until something changes, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        await self.run(self.store.close)
        self._thread.shutdown()


def _is_shared(state: Host) -> bool:
    """Return whether the requests of several API keys are told apart."""
    server = state.config.server
    return len(set(server.api_key)) > 1 or server.api_key_file is not None


def retry_seconds(failures: int) -> float:
    return min(RETRY_SECONDS * 2 ** (failures - 1), MAX_RETRY_SECONDS)


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
    retries: list[tuple[float, Line]] = field(default_factory=list)  # lines that are run again, and when
    attempts: dict[int, int] = field(default_factory=dict)  # by the number of a line that was answered by 503
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
        await self.batches.run_steps(self.store.finish(self.batch.id, end, unfinished))
        batch = await self._do(self.store.batch, self.batch.id)
        logger.info("%s %s: %d of %d requests succeeded", batch.id, batch.status, batch.completed, batch.total)

    async def _do(self, function: Callable[..., T], *arguments: object) -> T:
        return await self.batches.run(function, *arguments)

    async def _validate(self) -> None:
        path = self.store.path(self.batch.input_file_id)
        lines, errors = await self._read(LARGE, lambda: read_lines(path, self.batch.endpoint))
        if not errors:
            try:
                await self._do(self.store.reserve, self.batch.id, lines)
            except BadRequest as error:
                errors = [{"code": error.code, "line": None, "message": error.message, "param": error.param}]
        if errors:
            await self.batches.run_steps(self.store.fail(self.batch.id, errors))
        else:
            await self.batches.run_steps(self.store.begin(self.batch.id, lines))

    async def _read(self, size: int, function: Callable[[], T]) -> T:
        """Return the result of a function that reads the input, in a turn of the batch's owner."""
        return await self.batches.state.threads.run(size, function, self._caller().turn)

    def _caller(self) -> Caller:
        """Return the caller of one of its lines."""
        return Caller(uuid.uuid4().hex, owner=self.batch.owner, tenant=self.batch.tenant, background=True)

    async def _run_lines(self) -> tuple[str | None, bytes | None]:
        """Return (the status that the batch ends with, the error of lines that did not run); (None, None) if it goes on
        when the server runs again, or has ended already.
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
        num_rows = self.batches.state.num_rows
        share = min(num_rows, MAX_RUNNING) // len(self.batches.active)
        room = max(share, 1) - len(self.running) if num_rows else 0
        if room <= 0:
            return 1
        now = time.monotonic()
        due = [line for at, line in self.retries if at <= now][:room]
        self.retries = [(at, line) for at, line in self.retries if line not in due]
        lines = due
        if len(lines) < room:
            lines += await self._do(self.store.missing_lines, self.batch.id, self.last, room - len(lines))
        for line in lines:
            self.last = max(self.last, line.number)
            task = asyncio.create_task(self._run_line(line))
            self.running.add(task)
        return len(lines) + len(self.retries)

    async def _wait_for_one(self) -> None:
        if not self.running:
            await self.batches.wait(POLL_SECONDS)
            return
        done, self.running = await asyncio.wait(self.running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _run_line(self, line: Line) -> None:
        """Store the line's result, whatever it is, or run the line again later. Raises sqlite3.Error."""
        number = f"{self.batch.id.removeprefix('batch_')}_{line.number}"
        status, request_id, answer = await self._answer(line, number)
        if status == 503 and self._may_retry(line):
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

    async def _answer(self, line: Line, number: str) -> tuple[int, str, bytes]:
        """Return (status, request id, body) of the endpoint's answer. Any exception is an error of this line."""
        try:
            path = self.store.path(self.batch.input_file_id)
            body = await self._read(max(line.length, SMALL), lambda: read_body(path, line))
            return await in_process.call(self.app, self.batch.endpoint, body, self._caller())
        except BadRequest as error:
            return error.status, number, body_of(error, self.batch.endpoint)
        except Exception:
            logger.exception("line %d of %s failed", line.number, self.batch.id)
            return 500, number, internal_body(self.batch.endpoint)

    def _may_retry(self, line: Line) -> bool:
        """Return whether to wait after 503. While the engine loads, restarts or drains, a line waits for as long as its
        batch may; a ready server that is too busy for it has `MAX_ATTEMPTS`.
        """
        failures = 1
        if self.batches.state.status == "ready":
            failures = self.attempts[line.number] = self.attempts.get(line.number, 0) + 1
        if failures >= MAX_ATTEMPTS:
            return False
        self.retries.append((time.monotonic() + retry_seconds(failures), line))
        return True
