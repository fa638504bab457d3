"""Names that the user gave to models with `quire cp` and `quire create`, in a file of quire's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.checkpoints import packaged
from quire.checkpoints.library.entries import Entry, from_json, to_json

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,127}/)?[A-Za-z0-9][\w.-]{0,127}(:[\w.-]{1,64})?")
_MAX_NAMES = 10_000


def path() -> Path:
    """Return $QUIRE_CACHE/aliases.json, by default ~/.cache/quire/aliases.json."""
    return packaged.folder().parent / "aliases.json"


def canonical(name: str) -> str:
    """Return `name` without the tag `latest`, which is the default tag."""
    return name.removesuffix(":latest")


def entries() -> dict[str, Entry]:
    """Return all names with their entries. Raises ValueError if the file is damaged."""
    found: dict[str, Entry | None] = {name: from_json(value) for name, value in _read().items()}
    if None in found.values():
        raise _damaged()
    return found


def find(name: str) -> Entry | None:
    """Return the entry of a name, None if there is none. Raises ValueError if the file is damaged."""
    return entries().get(canonical(name))


def base_of(name: str) -> str:
    """Return the model that a name stands for, or `name` itself if the user did not define it."""
    return name if (found := find(name)) is None else found.base


def check_name(name: str) -> None:
    """Raise ValueError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:200]!r} cannot be a name: use letters, digits, `.`, `_`, `-`, one `/` after an owner and one `:` "
            "before a tag"
        )


def add(name: str, entry: Entry) -> None:
    """Let `name` stand for `entry`. Raises ValueError for an invalid name, OSError."""
    check_name(name)
    with _locked():
        found = _read()
        if len(found) >= _MAX_NAMES:
            raise ValueError(f"there are {_MAX_NAMES} names already: `quire rm` removes one")
        _write(found | {canonical(name): to_json(entry)})


def remove(name: str) -> bool:
    """Remove a name; return False if there is none. Raises OSError."""
    name = canonical(name)
    if name not in _read():
        return False
    with _locked():
        _write({other: value for other, value in _read().items() if other != name})
    return True


def _read() -> dict[str, Any]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError):  # another user's: its names are not ours
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _damaged()
    return found


def _damaged() -> ValueError:
    return ValueError(f"model: {path()} is damaged: remove it, and give the names again")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let no other process change the file within the block."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(content: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path().parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path())
