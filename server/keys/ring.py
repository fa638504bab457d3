"""All keys that the server accepts, from --api-key, --api-key-file and --admin-api-key."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from quire.configs.serving import ServerConfig
from quire.server.keys.key import Key, digest, read_keys
from quire.server.keys.ledger import Ledger

logger = logging.getLogger("quire.keys")

_LOOK_SECONDS = 1.0  # between looks at the file
_LARGE_FILE = 2**15  # bytes, which take some 20 ms


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key. `owner` is None if there is only one key, whose holder owns everything."""

    key: Key
    digest: bytes
    owner: str | None


class KeyRing:
    """`is_required`: requests need a key, and not only those for administrators."""

    def __init__(self, config: ServerConfig, counts: bool = True):
        """Raise ValueError for a file of keys that cannot be used. With `counts` the use of limited keys is counted in
        a file.
        """
        self._path, self._counts = config.api_key_file, counts
        plain = list(dict.fromkeys(config.api_key))
        several = len(plain) > 1 or self._path is not None
        given = [Key(name=f"key-{i}", key=key) for i, key in enumerate(plain, start=1)]
        given += [Key(name="admin", key=key, admin=True) for key in dict.fromkeys(config.admin_api_key)]
        # these keys are text whatever they look like: only a file may have hashes
        self._given = [
            Holder(
                key,
                digest(key.key.encode()),
                hashlib.sha256(b"prefix cache of " + key.key.encode()).hexdigest()[:32] if several else None,
            )
            for key in given
        ]
        self.is_required = bool(plain) or self._path is not None
        self.ledger = Ledger(config.key_usage_file, self._path)
        self._stamp: tuple[int, ...] | None = None
        self._looked = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keys")  # its thread begins with the first large file
        self._reading: Future[list[Key]] | None = None
        self._keep(self._given)
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._keep([*self._given, *self._holders(read_keys(self._path))])

    def find(self, presented: bytes) -> Holder | None:
        """Return the holder of a key. The time depends on the key's hash alone, which does not reveal the key, and is
        the same for ten thousand keys as for one.
        """
        self._look()
        return self._by_digest.get(digest(presented))

    def key_of_owner(self, owner: str) -> Key | None:
        """Return the key whose holder began a batch; None if it was removed, or there are no keys."""
        return self._by_owner.get(owner)

    def _keep(self, holders: list[Holder]) -> None:
        self._by_digest = {holder.digest: holder for holder in holders}
        self._by_owner = {holder.owner: holder.key for holder in reversed(holders) if holder.owner is not None}

    def close(self) -> None:
        self.ledger.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- the file

    def _holders(self, keys: list[Key]) -> list[Holder]:
        taken = {holder.digest for holder in self._given}
        names = {holder.key.name for holder in self._given}
        for key in keys:
            if key.digest in taken or key.name in names:
                raise ValueError(f"--api-key-file {self._path}: '{key.name}' is also a key of --api-key or an admin's")
        if self._counts and any(key.is_limited for key in keys):
            self.ledger.open()
        return [Holder(key, key.digest, key.owner) for key in keys]

    def _look(self) -> None:
        """Read the file again if it has changed, a large one in a thread. One that cannot be read changes nothing."""
        if self._reading is not None:
            if self._reading.done():
                reading, self._reading = self._reading, None
                self._take(reading.result)
            return
        now = time.monotonic()
        if self._path is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        read = partial(read_keys, self._path)
        if stamp is not None and stamp[1] > _LARGE_FILE:
            self._reading = self._pool.submit(read)
        else:
            self._take(read)

    def _take(self, read: Callable[[], list[Key]]) -> None:
        try:
            named = self._holders(read())
        except ValueError as error:
            logger.error("%s; the keys read before stay valid", error)
        else:
            self._keep([*self._given, *named])
            logger.info("--api-key-file: read %d keys", len(named))


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
