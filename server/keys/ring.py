"""All keys that the server accepts, from --api-key, --api-key-file and --admin-api-key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from dataclasses import dataclass

from quire.configs.serving import ServerConfig
from quire.server.keys.key import Key, digest, read_keys
from quire.server.keys.ledger import Ledger

logger = logging.getLogger("quire.keys")

_LOOK_SECONDS = 1.0  # between looks at the file


@dataclass(frozen=True, slots=True)
class Holder:
    """Who presents a key. `owner` is None if there is only one key, whose holder owns everything."""

    key: Key
    digest: bytes
    owner: str | None


class KeyRing:
    """`is_required`: requests need a key, and not only those for administrators."""

    def __init__(self, config: ServerConfig):
        """Raises ValueError for a file of keys that cannot be used."""
        self._path = config.api_key_file
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
        self.has_admin_routes = bool(given) or self._path is not None
        self.ledger = Ledger(config.key_usage_file, self._path)
        self._stamp: tuple[int, ...] | None = None
        self._looked = 0.0
        self._named: list[Holder] = []
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._named = self._read()

    def find(self, presented: bytes) -> Holder | None:
        """Whose key this is. Takes the same time whichever key it is, and for one that is none."""
        self._look()
        given, found = digest(presented), None
        for holder in (*self._given, *self._named):
            if hmac.compare_digest(given, holder.digest):
                found = holder
        return found

    def of_owner(self, owner: str) -> Key | None:
        """The key whose holder began a batch; None if it was removed, or there are no keys."""
        return next((holder.key for holder in (*self._given, *self._named) if holder.owner == owner), None)

    def close(self) -> None:
        self.ledger.close()

    # ---- the file

    def _read(self) -> list[Holder]:
        keys = read_keys(self._path)
        taken = {holder.digest for holder in self._given}
        names = {holder.key.name for holder in self._given}
        for key in keys:
            if key.digest in taken or key.name in names:
                raise ValueError(f"--api-key-file {self._path}: '{key.name}' is also a key of --api-key or an admin's")
        if any(key.is_limited for key in keys):
            self.ledger.open()
        return [Holder(key, key.digest, key.owner) for key in keys]

    def _look(self) -> None:
        """Read the file again if it has changed. One that cannot be read changes nothing."""
        now = time.monotonic()
        if self._path is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._named = self._read()
        except ValueError as error:
            logger.error("%s; the keys read before stay valid", error)
        else:
            logger.info("--api-key-file: read %d keys", len(self._named))


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
