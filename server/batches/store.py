"""Files and batches on disk: a SQLite database and one file per upload or output, in the folder of `--batch-dir`.

All methods block, so the server calls them in one thread of their own; those that change many rows return steps, so
that others get their turn between these. Every change is one transaction: after a kill -9 a batch continues with the
lines that have no result.

Bytes count before they are written (`Store.reserve`): those of files, of the rows of batches, and of
the outputs that these will have.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.server import database
from quire.server.batches.disk import Part, abandoned, or_full
from quire.server.errors import BadRequest, NotFound, TooManyRequests
from quire.server.private_files import private_folder

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT, purpose TEXT, filename TEXT, bytes INTEGER, created_at INTEGER,
    expires_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT, tenant TEXT, endpoint TEXT, input_file_id TEXT, completion_window TEXT,
    metadata BLOB, errors BLOB, status TEXT, created_at INTEGER, expires_at INTEGER, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER,
    cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT,
    total INTEGER DEFAULT 0, completed INTEGER DEFAULT 0, failed INTEGER DEFAULT 0, result_bytes INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT, number INTEGER, start INTEGER, length INTEGER, custom_id TEXT, succeeded INTEGER, result BLOB,
    PRIMARY KEY (batch, number));
"""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
MAX_OPEN = 64  # batches of one owner
ROWS = 1000  # per transaction
STEP_BYTES = 2**23  # for results, written in a step
FILE_BYTES = 1024  # per file's row, in addition to its content
BATCH_BYTES = 4096  # per batch's row, with errors, in addition to its metadata
LINE_BYTES = 512  # per line's row, and of the error that its output has if it does not run; its custom_id is extra


@dataclass(frozen=True, slots=True)
class File:
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Times are in seconds since the epoch, None for events that have not happened."""

    id: str
    owner: str
    tenant: str | None
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: bytes | None  # JSON
    errors: bytes | None  # JSON, a list
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    total: int
    completed: int
    failed: int
    result_bytes: int  # reserved: bytes of its rows and of its outputs


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch: `length` bytes from `start` on in the input file."""

    number: int
    start: int
    length: int
    custom_id: str


class Store(database.Store):
    """Batches, their files and results. `max_bytes` bounds the bytes of all owners. One of `several` owners takes at
    most half of the bytes that the others leave.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, several: bool = False):
        """Raise OSError if the folder cannot be written, sqlite3.Error for a damaged database."""
        self.folder, self.max_bytes, self.several = Path(folder), max_bytes, several
        self._held: Counter[str] = Counter()  # bytes of uploads that are on their way, by owner
        self._held_lock = threading.Lock()
        for one in (self.folder, self.folder / "files"):
            private_folder(one)
        (self.folder / "files").chmod(0o700)
        # auto_vacuum: deleted rows are given back
        pragmas = "auto_vacuum = INCREMENTAL", f"journal_size_limit = {STEP_BYTES}"
        super().__init__(self.folder / "batches.sqlite", _SCHEMA, *pragmas)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a process left when it was killed: files without a row, lines of batches that have ended."""
        with self._transaction() as db:  # no file is between its name and its row
            known = {file_id for (file_id,) in db.execute("SELECT id FROM files")}
            for path in abandoned(self.folder / "files", known):
                path.unlink(missing_ok=True)
        ended = f"SELECT DISTINCT batch FROM lines WHERE batch NOT IN (SELECT id FROM batches WHERE status IN {_OPEN})"
        for (batch_id,) in self._db.execute(ended).fetchall():
            for _ in self._forget_lines(batch_id):
                pass

    # ---- space

    def used_bytes(self, owner: str | None = None) -> int:
        """Return bytes that an owner takes, or all (None), those reserved included."""
        condition = "TRUE" if owner is None else "owner = ?"
        given = () if owner is None else (owner,)
        sums = (("bytes", "files"), ("result_bytes", "batches"))
        used = [
            self._db.execute(
                f"SELECT COALESCE(SUM({column}), 0), COUNT(*) FROM {table} WHERE {condition}", given
            ).fetchone()
            for column, table in sums
        ]
        held = self._held.total() if owner is None else self._held[owner]
        return used[0][0] + FILE_BYTES * used[0][1] + used[1][0] + held

    def free_bytes(self, owner: str) -> int:
        """Return bytes that an owner may take in addition."""
        used, own = self.used_bytes(), self.used_bytes(owner)
        left = self.max_bytes - (used - own)
        return max((left // 2 if self.several else left) - own, 0)

    def require_space(self, num_bytes: int, owner: str, what: str, param: str) -> None:
        """Raise BadRequest if `num_bytes` more of an owner would exceed the limit."""
        self._delete_expired_files()
        if num_bytes > (free := self.free_bytes(owner)):
            raise BadRequest(
                f"{what} has {num_bytes} bytes, and {free} of the {self.max_bytes} bytes of --batch-disk are free for "
                "you: delete files that are no longer needed.",
                param=param,
                code="storage_full",
            )

    def hold(self, num_bytes: int, owner: str) -> None:
        """Reserve space for an upload until `release`, or until it is stored. Raises BadRequest if there is none."""
        self.require_space(num_bytes + FILE_BYTES, owner, "The file", "file")
        with self._held_lock:
            self._held[owner] += num_bytes

    def release(self, num_bytes: int, owner: str) -> None:
        """Release the batch. May be called in any thread."""
        with self._held_lock:
            self._held[owner] -= num_bytes
            if not self._held[owner]:
                del self._held[owner]

    # ---- files

    def path(self, file_id: str) -> Path:
        return self.folder / "files" / file_id

    def open(self, file_id: str) -> BinaryIO:
        """Return a file's content, which stays readable when the file is deleted. Raises NotFound."""
        try:
            return open(self.path(file_id), "rb")
        except FileNotFoundError:
            raise _no_such_file(file_id) from None

    def add_file(self, content: BinaryIO, owner: str, purpose: str, filename: str, seconds: int | None) -> File:
        """Store a file, which expires after `seconds`. Raises BadRequest if the owner has no space for it,
        InsufficientStorage if the disk has none.
        """
        self.require_space(content.seek(0, os.SEEK_END) + FILE_BYTES, owner, "The file", "file")
        return self.keep(self.write(content), owner, purpose, filename, seconds)

    def write(self, content: BinaryIO) -> Part:
        """Write a file that is to be kept; may be called in any thread. Raises InsufficientStorage."""
        content.seek(0)
        with or_full():
            part = Part(self.folder / "files")
            try:
                shutil.copyfileobj(content, part.file, 1 << 20)
                part.close()
            except BaseException:
                part.discard()
                raise
        return part

    def keep(self, part: Part, owner: str, purpose: str, filename: str, seconds: int | None) -> File:
        """Store what was written, for which there is space. Raises InsufficientStorage."""
        now, size = int(time.time()), part.file.tell()
        file = File(f"file-{uuid.uuid4().hex}", owner, purpose, filename, size, now, seconds and now + seconds)
        with or_full():
            try:
                with self._transaction() as db:
                    self._insert_file(db, file, part)
            except BaseException:
                part.discard()
                self.path(file.id).unlink(missing_ok=True)
                raise
        return file

    def _insert_file(self, db: sqlite3.Connection, file: File, part: Part) -> None:
        """Insert a file within a transaction: name and row appear together."""
        db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, file.owner, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at),
        )
        part.finish(self.path(file.id))

    def file(self, file_id: str, owner: str) -> File:
        """Raise NotFound, also for a file of another owner."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None or (row[-1] is not None and row[-1] <= time.time()):
            raise _no_such_file(file_id)
        return File(*row)

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[File]:
        """Return at most `limit` files of an owner in the order of their creation, starting after the file `after`."""
        rows = self._page("files", owner, "purpose = :value" if purpose else "TRUE", after, limit, ascending, purpose)
        return [File(*row) for row in rows]

    def _page(
        self,
        table: str,
        owner: str,
        condition: str,
        after: str | None,
        limit: int,
        ascending: bool,
        value: str | None,
    ) -> list[tuple]:
        """Return a page of rows; `condition` may use `:value`."""
        direction, sign = ("ASC", ">") if ascending else ("DESC", "<")
        behind = f"(created_at, id) {sign} (SELECT created_at, id FROM {table} WHERE id = :after)" if after else "TRUE"
        return self._db.execute(
            f"SELECT * FROM {table} WHERE owner = :owner AND {condition} AND {behind} "
            f"ORDER BY created_at {direction}, id {direction} LIMIT :limit",
            {"owner": owner, "after": after, "limit": limit, "value": value},
        ).fetchall()

    def delete_file(self, file_id: str, owner: str) -> None:
        """Raise NotFound, and BadRequest while a batch reads the file."""
        self.file(file_id, owner)
        row = self._db.execute(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {_OPEN}", (file_id,)
        ).fetchone()
        if row is not None:
            raise BadRequest(f"The file is the input of {row[0]}, which has not ended.", param="file_id")
        self._delete_file(file_id)

    def _delete_file(self, file_id: str) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def _delete_expired_files(self) -> None:
        expired = self._db.execute(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            f"(SELECT input_file_id FROM batches WHERE status IN {_OPEN})",
            (time.time(),),
        ).fetchall()
        for (file_id,) in expired:
            self._delete_file(file_id)

    # ---- batches

    def add_batch(
        self,
        owner: str,
        tenant: str | None,
        endpoint: str,
        input_file_id: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None,
    ) -> Batch:
        """Return a new batch, to be validated by the runner. Raises NotFound for the file, BadRequest for its purpose
        or if the owner has no space, TooManyRequests, InsufficientStorage.
        """
        file = self.file(input_file_id, owner)
        if file.purpose != "batch":
            raise BadRequest(
                f"input_file_id: the file's purpose is '{file.purpose}', not 'batch'.", param="input_file_id"
            )
        (num_open,) = self._db.execute(
            f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN {_OPEN}", (owner,)
        ).fetchone()
        if num_open >= MAX_OPEN:
            raise TooManyRequests(
                f"{num_open} of your batches have not ended, and the limit is {MAX_OPEN}: wait for one, or cancel it.",
                retry_after=60,
            )
        batch_id, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        encoded = None if metadata is None else msgspec.json.encode(metadata)
        size = BATCH_BYTES + len(encoded or b"")
        self.require_space(size, owner, "The batch", "input_file_id")
        with or_full():
            self._db.execute(
                "INSERT INTO batches (id, owner, tenant, endpoint, input_file_id, completion_window, metadata, status, "
                "created_at, expires_at, result_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?)",
                (batch_id, owner, tenant, endpoint, input_file_id, window, encoded, now, now + seconds, size),
            )
        return self.batch(batch_id, owner)

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        """Raise NotFound, also for a batch of another owner (None: any)."""
        row = self._db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row is None or owner not in (None, row[1]):
            raise NotFound(f"No such batch: '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
        return Batch(*row)

    def batches(self, owner: str, after: str | None, limit: int, endpoint: str | None = None) -> list[Batch]:
        """Return at most `limit` batches of an owner (to one endpoint), newest first, starting after the batch
        `after`.
        """
        condition = "endpoint = :value" if endpoint else "TRUE"
        return [Batch(*row) for row in self._page("batches", owner, condition, after, limit, False, endpoint)]

    def delete_batch(self, batch_id: str) -> None:
        """Forget a batch that has ended, with its files."""
        batch = self.batch(batch_id)
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self._delete_file(file_id)
        self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def open_batches(self) -> list[Batch]:
        """Return the unfinished ones of all owners, oldest first."""
        rows = self._db.execute(f"SELECT * FROM batches WHERE status IN {_OPEN} ORDER BY created_at, id")
        return [Batch(*row) for row in rows.fetchall()]

    def set_status(self, batch_id: str, status: str, *, errors: list[dict[str, Any]] | None = None) -> None:
        """Enter `status` now."""
        self._db.execute(
            f"UPDATE batches SET status = ?, {status}_at = ?, errors = COALESCE(?, errors) WHERE id = ?",
            (status, int(time.time()), None if errors is None else msgspec.json.encode(errors), batch_id),
        )

    def cancel(self, batch_id: str, owner: str) -> Batch:
        """Ask the runner to cancel a batch. Raises NotFound, and BadRequest for a batch that has ended."""
        batch = self.batch(batch_id, owner)
        if batch.status not in OPEN:
            raise BadRequest(f"The batch has the status '{batch.status}' and cannot be cancelled.", param="batch_id")
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ? "
                "AND status IN ('validating', 'in_progress')",
                (int(time.time()), batch_id),
            )
        return self.batch(batch_id, owner)

    def reserve(self, batch_id: str, lines: list[Line]) -> None:
        """Count the rows of a batch's lines, and the output of those that will not run. Raises BadRequest if its owner
        has no space for them.
        """
        batch = self.batch(batch_id)
        size = sum(LINE_BYTES + 8 * len(line.custom_id.encode()) for line in lines)
        self.require_space(size, batch.owner, "With the batch's rows and outputs it", "input_file_id")
        self._db.execute("UPDATE batches SET result_bytes = ? WHERE id = ?", (_own_bytes(batch) + size, batch_id))

    def begin(self, batch_id: str, lines: list[Line]) -> Iterator[None]:
        """Begin to run `lines` of a valid input. In steps; may be repeated after a crash in the middle."""
        for first in range(0, len(lines), ROWS):
            with self._transaction() as db:
                db.executemany(
                    "INSERT OR REPLACE INTO lines (batch, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)",
                    [
                        (batch_id, line.number, line.start, line.length, line.custom_id)
                        for line in lines[first : first + ROWS]
                    ],
                )
            yield
        self._db.execute(
            "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
            "WHERE id = ? AND status = 'validating'",
            (int(time.time()), len(lines), batch_id),
        )

    def missing_lines(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Return at most `limit` lines with a number above `after` that have no result, in order."""
        rows = self._db.execute(
            "SELECT number, start, length, custom_id FROM lines WHERE batch = ? AND number > ? AND result IS NULL "
            "ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(*row) for row in rows.fetchall()]

    def add_result(self, batch_id: str, number: int, result: bytes, succeeded: bool) -> bool:
        """Store the result of a line; one that has a result keeps it. Returns False without storing it if its owner
        has no space for it, now and in the output.
        """
        batch = self.batch(batch_id)
        size = 2 * len(result)
        if size > self.free_bytes(batch.owner):
            return False
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE lines SET result = ?, succeeded = ? WHERE batch = ? AND number = ? AND result IS NULL",
                (result, succeeded, batch_id, number),
            ).rowcount
            column = "completed" if succeeded else "failed"
            db.execute(
                f"UPDATE batches SET {column} = {column} + ?, result_bytes = result_bytes + ? WHERE id = ?",
                (changed, changed * size, batch_id),
            )
        return True

    def finish(self, batch_id: str, status: str, unfinished: bytes | None) -> Iterator[None]:
        """Write the output files and enter `status`. Lines without a result get `unfinished`, JSON of an error object,
        or are left out (None). In steps; may be repeated after a crash in the middle. Raises OSError, sqlite3.Error.
        """
        batch = self.batch(batch_id)
        parts = {column: Part(self.folder / "files") for column in ("output_file_id", "error_file_id")}
        files: list[tuple[File, Part]] = []
        try:
            yield from self._write_results(batch_id, list(parts.values()), unfinished)
            names: dict[str, str] = {}
            for column, part in parts.items():
                if size := part.close():
                    names[column] = f"file-{batch_id.removeprefix('batch_')}{column[0]}"
                    name = f"{batch_id}_{column.split('_')[0]}.jsonl"
                    now = int(time.time())
                    files.append((File(names[column], batch.owner, "batch_output", name, size, now, None), part))
            with self._transaction() as db:
                for file, part in files:
                    self._insert_file(db, file, part)
                db.execute(
                    f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, "
                    "result_bytes = ? WHERE id = ?",
                    (
                        status,
                        int(time.time()),
                        names.get("output_file_id"),
                        names.get("error_file_id"),
                        _own_bytes(batch),
                        batch_id,
                    ),
                )
        except BaseException:
            for file, _ in files:
                self.path(file.id).unlink(missing_ok=True)
            raise
        finally:
            for part in parts.values():
                part.discard()
        yield from self._forget_lines(batch_id)

    def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> Iterator[None]:
        """End a batch that cannot run. In steps."""
        batch = self.batch(batch_id)
        with self._transaction() as db:
            self.set_status(batch_id, "failed", errors=errors)
            db.execute("UPDATE batches SET result_bytes = ? WHERE id = ?", (_own_bytes(batch), batch_id))
        yield from self._forget_lines(batch_id)

    def _forget_lines(self, batch_id: str) -> Iterator[None]:
        some = "SELECT number FROM lines WHERE batch = ? ORDER BY number LIMIT ?"
        while self._db.execute(
            f"DELETE FROM lines WHERE batch = ? AND number IN ({some})", (batch_id, batch_id, ROWS)
        ).rowcount:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            yield

    def _write_results(self, batch_id: str, parts: list[Part], unfinished: bytes | None) -> Iterator[None]:
        """Write the results, in the order of the input, to two files: those that succeeded, and the others."""
        number, more = 0, True
        while more:
            more, size = False, 0
            rows = self._db.execute(
                "SELECT number, custom_id, succeeded, result FROM lines WHERE batch = ? AND number > ? "
                "ORDER BY number LIMIT ?",
                (batch_id, number, ROWS),
            )
            for number, custom_id, succeeded, result in rows:
                more = True
                if result is None and unfinished is not None:
                    result = b'{"id":%b,"custom_id":%b,"response":null,"error":%b}' % (
                        msgspec.json.encode(f"batch_req_{batch_id.removeprefix('batch_')}_{number}"),
                        msgspec.json.encode(custom_id),
                        unfinished,
                    )
                if result is not None:
                    parts[0 if succeeded else 1].file.write(result + b"\n")
                    size += len(result)
                    if size > STEP_BYTES:
                        break
            yield


def _own_bytes(batch: Batch) -> int:
    """Return bytes of the row of a batch."""
    return BATCH_BYTES + len(batch.metadata or b"")


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such file: '{file_id[:100]}'.", param="file_id", code="file_not_found")
