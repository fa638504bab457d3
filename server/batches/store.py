"""Files and batches on disk: a SQLite database and one file per upload or output, in the folder of `--batch-dir`.

All methods block, so the server calls them in one thread of their own. Every change is one transaction: after a kill -9
a batch continues with the lines that have no result.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.server.errors import BadRequest, NotFound

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
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
"""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


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
    """Times are in seconds since the epoch, None for what has not happened."""

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
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch: `length` bytes from `start` on in the input file."""

    number: int
    start: int
    length: int
    custom_id: str


class Store:
    """`max_bytes` bounds the files and the results together."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        """Raises OSError if the folder cannot be written, sqlite3.Error for a damaged database."""
        self.folder, self.max_bytes = Path(folder), max_bytes
        (self.folder / "files").mkdir(parents=True, exist_ok=True)
        # the single thread that uses it is not the one that opens it
        self._db = sqlite3.connect(
            self.folder / "batches.sqlite", isolation_level=None, timeout=30, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- files

    def path(self, file_id: str) -> Path:
        return self.folder / "files" / file_id

    def open(self, file_id: str) -> BinaryIO:
        """A file's content, which stays readable when the file is deleted. Raises NotFound."""
        try:
            return open(self.path(file_id), "rb")
        except FileNotFoundError:
            raise _no_such_file(file_id) from None

    def used_bytes(self) -> int:
        files, results = (
            self._db.execute(f"SELECT COALESCE(SUM({column}), 0) FROM {table}").fetchone()[0]
            for column, table in (("bytes", "files"), ("result_bytes", "batches"))
        )
        return files + results

    def require_space(self, num_bytes: int) -> None:
        """Raises BadRequest if `num_bytes` more would exceed the limit."""
        self._delete_expired_files()
        if (used := self.used_bytes()) + num_bytes > self.max_bytes:
            raise BadRequest(
                f"The file has {num_bytes} bytes, and {max(self.max_bytes - used, 0)} of the {self.max_bytes} bytes of "
                "--batch-disk are free: delete files that are no longer needed.",
                param="file",
                code="storage_full",
            )

    def add_file(self, content: BinaryIO, owner: str, purpose: str, filename: str, seconds: int | None) -> File:
        """Store an upload, which expires after `seconds`. Raises BadRequest if there is no space."""
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        self.require_space(size)
        file_id = f"file-{uuid.uuid4().hex}"
        with open(self.path(file_id), "xb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        now = int(time.time())
        file = File(file_id, owner, purpose, filename, size, now, seconds and now + seconds)
        self._insert_file(file)
        return file

    def _insert_file(self, file: File) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, file.owner, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at),
        )

    def file(self, file_id: str, owner: str) -> File:
        """Raises NotFound, also for a file of another owner."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None or (row[-1] is not None and row[-1] <= time.time()):
            raise _no_such_file(file_id)
        return File(*row)

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[File]:
        """At most `limit` files of an owner in the order of their creation, beginning behind the file `after`."""
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
        """`condition` may use `:value`."""
        direction, sign = ("ASC", ">") if ascending else ("DESC", "<")
        behind = f"(created_at, id) {sign} (SELECT created_at, id FROM {table} WHERE id = :after)" if after else "TRUE"
        return self._db.execute(
            f"SELECT * FROM {table} WHERE owner = :owner AND {condition} AND {behind} "
            f"ORDER BY created_at {direction}, id {direction} LIMIT :limit",
            {"owner": owner, "after": after, "limit": limit, "value": value},
        ).fetchall()

    def delete_file(self, file_id: str, owner: str) -> None:
        """Raises NotFound, and BadRequest while a batch reads the file."""
        self.file(file_id, owner)
        marks = ", ".join("?" * len(OPEN))
        row = self._db.execute(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})", (file_id, *OPEN)
        ).fetchone()
        if row is not None:
            raise BadRequest(f"The file is the input of {row[0]}, which has not ended.", param="file_id")
        self._delete_file(file_id)

    def _delete_file(self, file_id: str) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def _delete_expired_files(self) -> None:
        marks = ", ".join("?" * len(OPEN))
        expired = self._db.execute(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            f"(SELECT input_file_id FROM batches WHERE status IN ({marks}))",
            (time.time(), *OPEN),
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
        """A new batch, to be validated by the runner. Raises NotFound for the file, BadRequest for its purpose."""
        file = self.file(input_file_id, owner)
        if file.purpose != "batch":
            raise BadRequest(
                f"input_file_id: the file's purpose is '{file.purpose}', not 'batch'.", param="input_file_id"
            )
        batch_id, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        self._db.execute(
            "INSERT INTO batches (id, owner, tenant, endpoint, input_file_id, completion_window, metadata, status, "
            "created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?)",
            (
                batch_id,
                owner,
                tenant,
                endpoint,
                input_file_id,
                window,
                None if metadata is None else msgspec.json.encode(metadata),
                now,
                now + seconds,
            ),
        )
        return self.batch(batch_id, owner)

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        """Raises NotFound, also for a batch of another owner (None: any)."""
        row = self._db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row is None or owner not in (None, row[1]):
            raise NotFound(f"No such batch: '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
        return Batch(*row)

    def batches(self, owner: str, after: str | None, limit: int, endpoint: str | None = None) -> list[Batch]:
        """At most `limit` batches of an owner (to one endpoint), newest first, beginning behind the batch `after`."""
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
        """The unfinished ones of all owners, oldest first."""
        marks = ", ".join("?" * len(OPEN))
        rows = self._db.execute(f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY created_at, id", OPEN)
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

    def begin(self, batch_id: str, lines: list[Line]) -> None:
        """The input is valid: `lines` are to be run."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO lines (batch, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)",
                [(batch_id, line.number, line.start, line.length, line.custom_id) for line in lines],
            )
            db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
                "WHERE id = ? AND status = 'validating'",
                (int(time.time()), len(lines), batch_id),
            )

    def missing_lines(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """At most `limit` lines with a number above `after` that have no result, in order."""
        rows = self._db.execute(
            "SELECT number, start, length, custom_id FROM lines WHERE batch = ? AND number > ? AND result IS NULL "
            "ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(*row) for row in rows.fetchall()]

    def add_result(self, batch_id: str, number: int, result: bytes, succeeded: bool) -> bool:
        """Store the result of a line; one that has a result keeps it. Returns whether there is space for more."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE lines SET result = ?, succeeded = ? WHERE batch = ? AND number = ? AND result IS NULL",
                (result, succeeded, batch_id, number),
            ).rowcount
            column = "completed" if succeeded else "failed"
            db.execute(
                f"UPDATE batches SET {column} = {column} + ?, result_bytes = result_bytes + ? WHERE id = ?",
                (changed, changed * len(result), batch_id),
            )
        return self.used_bytes() < self.max_bytes

    def finish(self, batch_id: str, status: str, unfinished: bytes | None) -> None:
        """Write the output files and enter `status`. Lines without a result get `unfinished`, JSON of an error object,
        or are left out (None). May be repeated after a crash in its middle.
        """
        batch = self.batch(batch_id)
        names = {}
        for succeeded, column in ((1, "output_file_id"), (0, "error_file_id")):
            file_id = getattr(batch, column) or f"file-{batch_id.removeprefix('batch_')}{column[0]}"
            size = self._write_results(batch_id, file_id, succeeded, None if succeeded else unfinished)
            if size:
                name = f"{batch_id}_{column.split('_')[0]}.jsonl"
                self._insert_file(File(file_id, batch.owner, "batch_output", name, size, int(time.time()), None))
                names[column] = file_id
        with self._transaction() as db:
            db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, "
                "result_bytes = 0 WHERE id = ?",
                (status, int(time.time()), names.get("output_file_id"), names.get("error_file_id"), batch_id),
            )
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))

    def _write_results(self, batch_id: str, file_id: str, succeeded: int, unfinished: bytes | None) -> int:
        """Write the results of one kind, in the order of the input, to a file; returns its size, 0 for none."""
        rows = self._db.execute(
            "SELECT number, custom_id, result FROM lines WHERE batch = ? AND "
            "(succeeded = ? OR (result IS NULL AND ?)) ORDER BY number",
            (batch_id, succeeded, unfinished is not None),
        )
        path = self.path(file_id)
        with open(path, "wb") as out:
            for number, custom_id, result in rows:
                if result is None:
                    result = b'{"id":%b,"custom_id":%b,"response":null,"error":%b}' % (
                        msgspec.json.encode(f"batch_req_{batch_id.removeprefix('batch_')}_{number}"),
                        msgspec.json.encode(custom_id),
                        unfinished,
                    )
                out.write(result + b"\n")
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        if not size:
            path.unlink()
        return size


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such file: '{file_id[:100]}'.", param="file_id", code="file_not_found")
