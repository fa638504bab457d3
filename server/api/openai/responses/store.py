"""Responses and conversations that are kept: a SQLite database, in memory or in the file of `--responses-store`, which
survives a restart and which several processes may share. The least recently used ones of the owner that has most make
room for new ones, so that no owner can remove what another keeps within an equal share.

All methods block, so the server calls them in one thread of their own.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.server import database
from quire.server.errors import BadRequest, NotFound

MAX_OBJECTS = 10_000
MAX_CHAIN = 2_000  # responses before a response
LEASE = 15.0  # seconds after which a running response whose process is silent counts as failed
_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    id TEXT PRIMARY KEY, owner TEXT, previous TEXT, status TEXT, body BLOB, items BLOB, events BLOB, size INTEGER,
    used INTEGER, alive REAL);
CREATE INDEX IF NOT EXISTS objects_by_use ON objects (used, size, status);
CREATE TABLE IF NOT EXISTS totals (count INTEGER, size INTEGER);
INSERT INTO totals SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM totals);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON objects BEGIN
    UPDATE totals SET count = count + 1, size = size + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON objects BEGIN
    UPDATE totals SET count = count - 1, size = size - OLD.size; END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF size ON objects BEGIN
    UPDATE totals SET size = size - OLD.size + NEW.size; END;
CREATE INDEX IF NOT EXISTS objects_by_owner ON objects (owner, used, size, status);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, count INTEGER, size INTEGER) WITHOUT ROWID;
INSERT INTO owners SELECT owner, COUNT(*), SUM(size) FROM objects WHERE NOT EXISTS (SELECT 1 FROM owners)
    GROUP BY owner;
CREATE TRIGGER IF NOT EXISTS owner_added AFTER INSERT ON objects BEGIN
    INSERT INTO owners SELECT NEW.owner, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM owners WHERE owner = NEW.owner);
    UPDATE owners SET count = count + 1, size = size + NEW.size WHERE owner = NEW.owner; END;
CREATE TRIGGER IF NOT EXISTS owner_removed AFTER DELETE ON objects BEGIN
    UPDATE owners SET count = count - 1, size = size - OLD.size WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND count = 0; END;
CREATE TRIGGER IF NOT EXISTS owner_resized AFTER UPDATE OF size ON objects BEGIN
    UPDATE owners SET size = size - OLD.size + NEW.size WHERE owner = OLD.owner; END;
"""
_OVERHEAD = 256  # bytes that an object takes in addition to its texts
RUNNING = ("queued", "in_progress", "cancelling")
_RUNNING = "('queued', 'in_progress', 'cancelling')"


@dataclass(slots=True)
class Stored:
    """A response or a conversation. body: its JSON. items: JSON list of the input of a response or the items of a
    conversation. events: of a resumable stream, without the last one, compressed. alive: when a running one was last
    heard of, in seconds since the epoch.
    """

    id: str
    owner: str
    previous: str | None  # the response before this one
    status: str  # for a conversation: "conversation"
    body: bytes
    items: bytes
    events: bytes | None = None
    alive: float = 0.0


_COLUMNS = "id, owner, previous, status, body, items, events, alive"


class Store(database.Store):
    """The database. `max_bytes` limits the size of all objects."""

    def __init__(self, path: str | None, max_bytes: int, max_objects: int = MAX_OBJECTS):
        """Open the file. Raises OSError, sqlite3.Error if it cannot be used."""
        self.max_bytes, self.max_objects = max_bytes, max_objects
        self.max_object_bytes = max_bytes // 8  # so that one object cannot evict all others
        self.num_evicted = 0  # evicted objects
        file = None if path in (None, ":memory:") else Path(path)
        super().__init__(file, _SCHEMA, "synchronous = NORMAL")

    # ---- objects

    def put(self, stored: Stored) -> bool:
        """Add an object, or replace one. Return whether it is kept: it is not if it is too large."""
        with self._transaction() as db:
            return self._put(db, stored)

    def add(self, stored: Stored) -> None:
        """Add an object. Raises BadRequest if it is too large."""
        if not self.put(stored):
            raise self._too_large("items")

    def finish(self, stored: Stored) -> bool:
        """Store the end of a running response, unless it was deleted. Return whether it is kept."""
        with self._transaction() as db:
            known = db.execute("SELECT 1 FROM objects WHERE id = ?", (stored.id,)).fetchone()
            return known is not None and self._put(db, stored)

    def get(self, object_id: str, owner: str, param: str) -> Stored:
        """Return an object. Raises NotFound, also for another owner's; `param` is the field that names it."""
        return self.change(object_id, owner, param, None)

    def change(self, object_id: str, owner: str, param: str, edit: Callable[[Stored], None] | None) -> Stored:
        """Return the object after `edit`, in one transaction. Raises NotFound, BadRequest if it gets too large, and the
        errors of `edit`.
        """
        with self._transaction() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM objects WHERE id = ? AND owner = ?", (object_id, owner)
            ).fetchone()
            kind = "conversation" if param.startswith("conversation") else "response"
            if row is None or not object_id.startswith(kind[:4]):
                raise NotFound(
                    f"No {kind} with id '{object_id[:100]}' is stored.", param=param, code=f"{kind}_not_found"
                )
            stored = Stored(*row)
            if stored.status in RUNNING and stored.alive < time.time() - LEASE:
                _give_up(stored)
                self._put(db, stored)
            if edit is None:
                self._touch(db, object_id)
                return stored
            edit(stored)
            if not self._put(db, stored):
                raise self._too_large(param)
            return stored

    def delete(self, object_id: str, owner: str, param: str) -> None:
        """Delete an object. Raises NotFound."""
        self.get(object_id, owner, param)
        self._db.execute("DELETE FROM objects WHERE id = ?", (object_id,))

    def _put(self, db: sqlite3.Connection, stored: Stored) -> bool:
        size = len(stored.body) + len(stored.items) + len(stored.events or b"") + _OVERHEAD
        if size > self.max_object_bytes:
            return False
        db.execute(
            f"INSERT INTO objects ({_COLUMNS}, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
            "SET status = excluded.status, body = excluded.body, items = excluded.items, events = excluded.events, "
            "alive = excluded.alive, size = excluded.size",
            (
                stored.id,
                stored.owner,
                stored.previous,
                stored.status,
                stored.body,
                stored.items,
                stored.events,
                time.time(),
                size,
            ),
        )
        self._touch(db, stored.id)
        self._make_room(db)
        return True

    def _too_large(self, param: str) -> BadRequest:
        return BadRequest(
            f"{param}: one conversation takes at most {self.max_object_bytes} bytes (--responses-store-size / 8).",
            param=param,
        )

    def _touch(self, db: sqlite3.Connection, object_id: str) -> None:
        newest = "(SELECT COALESCE(MAX(used), 0) + 1 FROM objects)"
        db.execute(f"UPDATE objects SET used = {newest} WHERE id = ?", (object_id,))

    def _make_room(self, db: sqlite3.Connection) -> None:
        count, size = db.execute("SELECT count, size FROM totals").fetchone()
        if count <= self.max_objects and size <= self.max_bytes:
            return
        held = {owner: [num, total] for owner, num, total in db.execute("SELECT owner, count, size FROM owners")}
        while held and (count > self.max_objects or size > self.max_bytes):
            by = 1 if size > self.max_bytes else 0  # the excess
            largest = max(held, key=lambda owner: held[owner][by])
            oldest = db.execute(
                f"SELECT id, size FROM objects WHERE owner = ? AND status NOT IN {_RUNNING} ORDER BY used LIMIT 1",
                (largest,),
            ).fetchone()
            if oldest is None:  # all of the owner's objects are running
                del held[largest]
                continue
            db.execute("DELETE FROM objects WHERE id = ?", oldest[:1])
            self.num_evicted += 1
            count, size = count - 1, size - oldest[1]
            held[largest][0] -= 1
            held[largest][1] -= oldest[1]

    # ---- the history of a response

    def chain(self, response_id: str, owner: str, max_bytes: int, may_cut: bool) -> list[Stored]:
        """Return a response and those before it, oldest first, of at most `max_bytes`; the oldest may be left out if
        `may_cut`. Raises NotFound, and BadRequest if the response has not ended, or for too long a chain.
        """
        found: list[Stored] = []
        size, following = 0, response_id
        while following is not None:
            one = self.get(following, owner, "previous_response_id")
            if one.status in RUNNING:
                raise BadRequest(
                    f"previous_response_id: the response '{one.id}' has not ended.", param="previous_response_id"
                )
            size += len(one.body) + len(one.items)
            if len(found) == MAX_CHAIN or size > max_bytes:
                if may_cut and found:
                    break
                raise BadRequest(
                    f"previous_response_id: the responses before this one are more than {MAX_CHAIN} or have more than "
                    f"{max_bytes} bytes. truncation 'auto' leaves out the oldest.",
                    param="previous_response_id",
                )
            found.append(one)
            following = one.previous
        return found[::-1]

    # ---- running responses

    def keep_alive(self, ids: list[str]) -> list[str]:
        """Mark responses as still running here. Return those to cancel and those that were deleted."""
        marks = ", ".join("?" * len(ids))
        with self._transaction() as db:
            db.execute(f"UPDATE objects SET alive = ? WHERE id IN ({marks})", (time.time(), *ids))
            rows = db.execute(f"SELECT id, status FROM objects WHERE id IN ({marks})", ids).fetchall()
        wanted = {object_id for object_id, status in rows if status != "cancelling"}
        return [object_id for object_id in ids if object_id not in wanted]

    def ask_to_cancel(self, response_id: str) -> None:
        """Request the cancellation of a response that another process runs."""
        self._db.execute(
            f"UPDATE objects SET status = 'cancelling' WHERE id = ? AND status IN {_RUNNING}", (response_id,)
        )


def _give_up(stored: Stored) -> None:
    """Fail a response whose process has ended."""
    body: dict[str, Any] = msgspec.json.decode(stored.body)
    error = {"code": "server_error", "message": "The server ended while the response was running."}
    stored.status = "failed"
    stored.body = msgspec.json.encode(body | {"status": "failed", "error": error})
