"""SQLite databases that only the server's user can read, of which every change is one transaction."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from quire.server.private_files import private_database

_TIMEOUT = 30.0  # seconds that a transaction waits for those of other processes


def connect(path: Path | None, *pragmas: str, timeout: float = _TIMEOUT) -> sqlite3.Connection:
    """Return the database of a file, or of memory without one. Raises OSError, sqlite3.Error."""
    if path is not None:
        private_database(path)
    # the single thread that uses it is not the one that opens it
    db = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=timeout, check_same_thread=False)
    for pragma in (*pragmas, "journal_mode = WAL"):  # WAL last: some others must precede the first page of a new file
        db.execute(f"PRAGMA {pragma}")
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Yield one transaction, which ends with the block: a change that raises is none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk may have ended it
            db.execute("ROLLBACK")
        raise


class Store:
    """Base of stores: a database with a schema, used by one thread."""

    def __init__(self, path: Path | None, schema: str, *pragmas: str):
        """Raise OSError for a file that cannot be written, sqlite3.Error for a damaged database."""
        self._db = connect(path, *pragmas)
        self._db.executescript(schema)

    def close(self) -> None:
        self._db.close()

    def _transaction(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        return transaction(self._db)
