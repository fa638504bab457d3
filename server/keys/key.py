"""API keys with a name and limits, as --api-key-file lists them."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from quire.server.values import Json

_HASH = "sha256:"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"  # also a label in /metrics and a word in logs
Limit = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[str, Meta(pattern=_NAME)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. A limit that is None does not apply."""

    name: Name
    key: Annotated[str, Meta(min_length=1)]  # the key itself, or "sha256:" and the hexadecimal hash of its UTF-8 bytes
    max_concurrent_requests: Limit | None = None
    max_queued_requests: Limit | None = None  # choices that wait, per frontend, while the server is full
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # prompt and output
    tokens_per_day: Limit | None = None  # for a day in UTC
    models: list[str] | None = None  # names that it may ask for; None: all
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # its share of a busy server, relative to other keys
    max_priority: int | None = None  # the lowest `priority` that it may ask for: lower ones run first
    admin: bool = False  # may use the routes of administrators
    metrics: bool = False  # may read the metrics of all keys

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key[len(_HASH) :]) if self.key.startswith(_HASH) else digest(self.key.encode())

    @property
    def is_limited(self) -> bool:
        """Return whether its requests have to be counted."""
        per_minute = self.requests_per_minute or self.tokens_per_minute
        return bool(per_minute or self.max_concurrent_requests or self.tokens_per_day)

    @property
    def owner(self) -> str:
        """Return the owner of the key's files, batches and shared prefixes. It stays when the key of this
        name is replaced.
        """
        return hashlib.sha256(b"named key " + self.name.encode()).hexdigest()[:32]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def hashed(key: str) -> str:
    """Return the stored form of `key` in a file."""
    return _HASH + digest(key.encode()).hex()


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if PyYAML was built with it


def read_keys(path: str) -> list[Key]:
    """Return the keys of a file. Raises ValueError naming the file, and the key and field at fault; no message has a
    key.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data: Json = yaml.load(file, _Loader)
    except OSError as error:
        raise ValueError(f"--api-key-file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"--api-key-file {path}{where}: this is not YAML") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {path}: this is not UTF-8") from None
    try:
        keys = msgspec.convert(data, _File).keys
    except msgspec.ValidationError as error:
        raise ValueError(f"--api-key-file {path}: {error}") from None
    _check(keys, path)
    return keys


def _check(keys: list[Key], path: str) -> None:
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.key.startswith(_HASH) and not re.fullmatch("[0-9a-fA-F]{64}", key.key[len(_HASH) :]):
            raise ValueError(
                f"--api-key-file {path}: the hash of '{key.name}' must be sha256: and 64 hexadecimal digits "
                "(`quire hash-key` makes one)"
            )
        if key.name in names:
            raise ValueError(f"--api-key-file {path}: the name '{key.name}' occurs twice")
        if (other := digests.get(key.digest)) is not None:
            raise ValueError(f"--api-key-file {path}: '{other}' and '{key.name}' have the same key")
        names.add(key.name)
        digests[key.digest] = key.name
