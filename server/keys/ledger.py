"""The usage of each key: requests in flight, requests and tokens of the last minute, tokens of the day.

Kept in a SQLite file that all frontends share and that survives a restart. Limits per minute are token buckets, which
hold a minute's worth and refill continuously. Output tokens are charged when a request ends, so a bucket may be in
debt, and further requests wait until it is paid. The day is UTC's.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import time
from pathlib import Path

from quire.configs import platforms
from quire.server.database import connect, transaction
from quire.server.errors import TooManyRequests, Unavailable
from quire.server.keys.key import Key
from quire.server.private_files import private_folder

_DAY, _MINUTE = 86400, 60.0
LIMIT_HEADERS = [
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
_TABLES = """
CREATE TABLE IF NOT EXISTS buckets (
    name TEXT, unit TEXT, level REAL NOT NULL, time REAL NOT NULL, PRIMARY KEY (name, unit)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS days (
    name TEXT, day INTEGER, tokens INTEGER NOT NULL, PRIMARY KEY (name, day)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running (
    name TEXT, pid INTEGER, count INTEGER NOT NULL, PRIMARY KEY (name, pid)) WITHOUT ROWID;
"""


class Ledger:
    """The use of keys. Belongs to the event loop of a frontend."""

    def __init__(self, path: str | None, key_file: str | None):
        self._path, self._key_file = path, key_file
        self._db: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file. Idempotent. Raises ValueError if the file cannot be written."""
        if self._db is not None:
            return
        path = Path(self._path) if self._path else _default_path(self._key_file or "")
        try:
            private_folder(path.parent)
            # synchronous: a crash of the machine may lose the last requests, one of the server none
            self._db = connect(path, "synchronous = OFF", timeout=1.0)
            self._db.executescript(_TABLES)
            self._db.execute("DELETE FROM running WHERE pid = ?", (os.getpid(),))
            self._db.execute("DELETE FROM days WHERE day < ?", (_today() - 31,))
        except (OSError, sqlite3.Error) as error:
            self._db = None
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"cannot count the use of keys in {path}: {why}; name another file by --key-usage-file"
            ) from None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def begin(self, key: Key, num_prompt_tokens: int, now: float | None = None) -> dict[str, str]:
        """Count a request that begins. Returns the x-ratelimit headers of its answer.

        Raises TooManyRequests, with the same headers, if a limit of `key` is reached: then nothing is counted.
        """
        try:
            return self._begin(key, num_prompt_tokens, time.time() if now is None else now)
        except sqlite3.Error as error:
            raise _no_count(error) from None

    def _begin(self, key: Key, num_prompt_tokens: int, now: float) -> dict[str, str]:
        with transaction(self._db):
            requests = _Bucket.read(self._db, key.name, "requests", key.requests_per_minute, now)
            tokens = _Bucket.read(self._db, key.name, "tokens", key.tokens_per_minute, now)
            self._refuse_spent(key, now)
            error = self._refusal(key, requests, tokens, num_prompt_tokens)
            if error is None:
                requests.level -= 1
                tokens.level -= num_prompt_tokens
                requests.write(self._db, key.name, now)
                tokens.write(self._db, key.name, now)
                self._add_to_day(key, num_prompt_tokens, now)
                self._run(key, 1)
        headers = requests.headers() | tokens.headers()
        if error is not None:
            error.limits = headers
            raise error
        return headers

    def begin_in_background(self, key: Key, num_prompt_tokens: int, now: float | None = None) -> None:
        """Count the tokens of a line of a batch, which waits for the engine rather than for a minute's limit. Raises
        TooManyRequests if the day's tokens are spent.
        """
        try:
            now = time.time() if now is None else now
            with transaction(self._db):
                self._refuse_spent(key, now)
                self._add_to_day(key, num_prompt_tokens, now)
        except sqlite3.Error as error:
            raise _no_count(error) from None

    def end(self, key: Key, num_output_tokens: int, background: bool = False, now: float | None = None) -> None:
        """Count a request that ended. Raises sqlite3.Error."""
        now = time.time() if now is None else now
        with transaction(self._db):
            self._add_to_day(key, num_output_tokens, now)
            if not background:
                tokens = _Bucket.read(self._db, key.name, "tokens", key.tokens_per_minute, now)
                tokens.level -= num_output_tokens
                tokens.write(self._db, key.name, now)
                self._run(key, -1)

    # ---- within a transaction

    def _refuse_spent(self, key: Key, now: float) -> None:
        if key.tokens_per_day is None:
            return
        day = int(now // _DAY)
        row = self._db.execute("SELECT tokens FROM days WHERE name = ? AND day = ?", (key.name, day)).fetchone()
        if row is not None and row[0] >= key.tokens_per_day:
            raise TooManyRequests(
                f"The tokens of '{key.name}' for this day are spent: {row[0]} of {key.tokens_per_day} "
                "(tokens_per_day).",
                code="insufficient_quota",
                retry_after=math.ceil((day + 1) * _DAY - now),
            )

    def _refusal(self, key: Key, requests: _Bucket, tokens: _Bucket, num_prompt_tokens: int) -> TooManyRequests | None:
        limit = key.max_concurrent_requests
        if limit is not None and (count := self._num_running(key)) >= limit:
            return TooManyRequests(
                f"{count} requests of '{key.name}' are running, which is its limit (max_concurrent_requests)."
            )
        for bucket, needed in ((requests, 1), (tokens, num_prompt_tokens)):
            if (seconds := bucket.seconds_until(needed)) > 0:
                return TooManyRequests(
                    f"The limit of '{key.name}' is reached: {bucket.limit} {bucket.unit} per minute "
                    f"({bucket.unit}_per_minute).",
                    retry_after=math.ceil(seconds),
                )
        return None

    def _num_running(self, key: Key) -> int:
        """Return the count in all live processes; a killed process leaves its count."""
        rows = self._db.execute("SELECT pid, count FROM running WHERE name = ?", (key.name,)).fetchall()
        return sum(count for pid, count in rows if platforms.process_exists(pid))

    def _run(self, key: Key, change: int) -> None:
        self._db.execute(
            "INSERT INTO running VALUES (?, ?, MAX(?, 0)) ON CONFLICT DO UPDATE SET count = MAX(count + ?, 0)",
            (key.name, os.getpid(), change, change),
        )

    def _add_to_day(self, key: Key, num_tokens: int, now: float) -> None:
        if key.tokens_per_day is not None:
            self._db.execute(
                "INSERT INTO days VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                (key.name, int(now // _DAY), num_tokens),
            )


class _Bucket:
    """`level` of at most `limit` units is left; without a limit it means nothing."""

    def __init__(self, unit: str, limit: int | None, level: float):
        self.unit, self.limit, self.level = unit, limit, level

    @classmethod
    def read(cls, db: sqlite3.Connection, name: str, unit: str, limit: int | None, now: float) -> _Bucket:
        if limit is None:
            return cls(unit, None, 0.0)
        row = db.execute("SELECT level, time FROM buckets WHERE name = ? AND unit = ?", (name, unit)).fetchone()
        if row is None:
            return cls(unit, limit, float(limit))
        return cls(unit, limit, min(row[0] + max(now - row[1], 0.0) * limit / _MINUTE, float(limit)))

    def write(self, db: sqlite3.Connection, name: str, now: float) -> None:
        if self.limit is not None:
            db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", (name, self.unit, self.level, now))

    def seconds_until(self, needed: int) -> float:
        """Return the seconds until `needed` units are there; more than a minute's worth waits for a full bucket."""
        if self.limit is None:
            return 0.0
        missing = min(needed, self.limit) - self.level
        return missing * _MINUTE / self.limit if missing > 1e-6 else 0.0

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers."""
        if self.limit is None:
            return {}
        return {
            f"x-ratelimit-limit-{self.unit}": str(self.limit),
            f"x-ratelimit-remaining-{self.unit}": str(max(math.floor(self.level + 1e-6), 0)),
            f"x-ratelimit-reset-{self.unit}": _duration(self.seconds_until(self.limit)),
        }


def _duration(seconds: float) -> str:
    """Write a duration as OpenAI does: `6m0s`, `1.25s`, `20ms`."""
    milliseconds = math.ceil(1000 * seconds - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


def _today() -> int:
    return int(time.time() // _DAY)


def _no_count(error: sqlite3.Error) -> Unavailable:
    return Unavailable(f"The server cannot count the requests of this key now: {error}.", retry_after=5)


def _default_path(key_file: str) -> Path:
    """Return one per file of keys, below $XDG_STATE_HOME or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.path.abspath(key_file).encode()).hexdigest()[:16]
    return Path(state) / "quire" / f"usage-{name}.sqlite"
