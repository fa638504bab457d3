"""Makes the entry of a new name from a Modelfile's fields: finds the base and the adapters, and checks that they are on
this machine.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from quire.checkpoints import packaged
from quire.checkpoints.gguf.folder import hub_patterns
from quire.checkpoints.library import aliases, names
from quire.checkpoints.library.entries import Entry

TEMPLATE_NOTE = "TEMPLATE is kept, but not used: it is not in Jinja, and the model's own chat template is used"


def placed(entry: Entry, folder: Path | None, served: str | None = None) -> Entry:
    """Return an entry of a Modelfile with the base and the adapters as they are kept: relative paths are relative to
    `folder`; None: paths are refused. Settings of a base that is itself a user's name are inherited. `served` is the
    model that a server serves under the name of the entry's base; it may be a path.

    Raises ValueError if the base is a known name without a model, or there is no such file.
    """
    adapters = tuple(_adapter(path, folder) for path in entry.adapters)
    if served is not None:
        entry, path = replace(entry, base=served), os.path.expanduser(served)
        base = os.path.abspath(path) if os.path.exists(path) else None
    else:
        base = _path(entry.base, folder, "FROM")
    if base is not None:
        return replace(entry, base=base, adapters=adapters)
    entry = replace(entry, adapters=adapters)
    if (own := aliases.find(entry.base)) is not None:
        return entry.over(own)
    names.located(entry.base)
    return entry


def renamed(model: str, folder: Path | None) -> Entry:
    """Return the entry of a copy of `model`: for a user's name, its own entry. Raises ValueError as `placed`."""
    if (own := aliases.find(model)) is not None:
        return own
    if os.path.exists(os.path.expanduser(model)) and folder is not None:
        return Entry(os.path.abspath(os.path.expanduser(model)))
    if folder is not None and model.startswith((".", "/", "~")):
        raise ValueError(f"there is no file or folder {model}")
    return placed(Entry(model), folder)


def is_here(model: str) -> bool:
    """Return whether the files of `model` are on this machine, without asking the Hub. Raises ValueError."""
    found = names.located(model)
    if os.path.exists(os.path.expanduser(found)) or (found in packaged.MODELS and packaged.cached(found) is not None):
        return True
    if found in packaged.MODELS:
        return False
    from quire.checkpoints.gguf.folder import quantized
    from quire.checkpoints.library.installed import gguf_files, repositories

    named = hub_patterns(found)
    repository = next((one for one in repositories() if one.repo_id == (named[0] if named else found)), None)
    if repository is None or named is None:
        return repository is not None
    files = sorted(gguf_files(repository))
    wanted = found.removeprefix(f"{named[0]}/")
    return wanted in files or bool(quantized(files, found.rpartition(":")[2]))


def _path(text: str, folder: Path | None, what: str) -> str | None:
    """Return the path that `text` means, None if it is a name. Raises ValueError if there is nothing at the path."""
    looks_like_one = text.startswith((".", "/", "~"))
    if folder is None:
        if looks_like_one or os.path.exists(os.path.expanduser(text)):
            raise ValueError(f"{what}: a path is taken from `quire create` on the server's machine only; name a model")
        return None
    path = folder / os.path.expanduser(text)
    if path.exists():
        return os.path.abspath(path)
    if looks_like_one:
        raise ValueError(f"{what}: there is no file or folder {path}")
    return None


def _adapter(text: str, folder: Path | None) -> str:
    if (path := _path(text, folder, "ADAPTER")) is not None:
        return path
    if not names.is_hub_adapter(text):
        raise ValueError(f"ADAPTER: {text[:200]} is neither a path nor the id ORG/NAME of an adapter on the Hub")
    return text
