"""Names that the user gave to models with `quire cp`, in a file of quire's cache folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from quire.checkpoints import packaged

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}(:[\w.-]{1,64})?")


def path() -> Path:
    """Return $QUIRE_CACHE/aliases.json, by default ~/.cache/quire/aliases.json."""
    return packaged.folder().parent / "aliases.json"


def aliases() -> dict[str, str]:
    """Return alias -> model. Raises ValueError if the file is damaged."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except PermissionError:
        return {}  # of another user: its names are not ours
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(model, str) for model in found.values()):
        raise ValueError(f"model: {path()} is damaged: remove it, and give the names again by `quire cp`")
    return found


def add(name: str, model: str) -> None:
    """Let `name` stand for `model`. Raises ValueError for a name that is none, OSError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a name: use letters, digits, `.`, `_`, `-` and one `:` before a tag")
    _write(aliases() | {name: model})


def remove(name: str) -> bool:
    """Remove an alias; return False if there is none. Raises OSError."""
    found = aliases()
    if name not in found:
        return False
    _write({other: model for other, model in found.items() if other != name})
    return True


def _write(content: dict[str, str]) -> None:
    path().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path().parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path())
