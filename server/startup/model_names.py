"""The names under which clients know the model: without the paths of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from quire.checkpoints.library.names import located
from quire.configs.config import Config
from quire.server.values import Json

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_SNAPSHOT = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/[0-9a-f]+$")


def default_name(model: str) -> str:
    """Return the stem of a GGUF file, the name of a folder, `org/name` of a snapshot in the Hugging Face cache; a Hub
    id as it is.
    """
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        name = Path(os.path.abspath(path)).name
        return _SHARD.sub("", name[:-5]) if name.lower().endswith(".gguf") else name
    if not os.path.isabs(path) and not os.path.isdir(path):
        return model
    path = os.path.abspath(path)
    if match := _SNAPSHOT.search(path):
        return f"{match['org']}/{match['name']}"
    return os.path.basename(path) or model


def served_names(config: Config) -> list[str]:
    """Return the names that the API lists; answers have the first."""
    plain = [name for name in config.models.alias if "=" not in name]
    names = [*config.server.served_model_name, *plain] or [default_name(config.model.model)]
    targets = (alias.partition("=") for alias in config.models.alias if "=" in alias)
    return list(dict.fromkeys([*names, *(alias for alias, _, name in targets if name in (*names, config.model.model))]))


def accepted_names(config: Config) -> frozenset[str]:
    """Return the names that requests may use but no answer shows: the model as given, if it has no other names."""
    return frozenset() if config.server.served_model_name or config.models.alias else frozenset({config.model.model})


def without_paths(text: str, config: Config, folder: str | None = None) -> str:
    """Return `text` with the model's name in place of its paths; `folder` is the one converted from its file."""
    model = os.path.expanduser(_located(config.model.model))
    paths = [folder, os.path.abspath(model)] if folder or os.path.exists(model) else []
    for path in filter(None, [*paths, model if os.path.isabs(model) else None]):
        text = text.replace(path, served_names(config)[0])
    return text


def _located(model: str) -> str:
    try:
        return located(model)
    except ValueError:  # the model cannot be served: only the error message has its path
        return model


def without_folders(value: Json) -> Any:
    """Return a setting without the folders of this machine: of a path, only the last part stays."""
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    name, equals, path = value.partition("=/")
    if equals and not name.startswith(("/", "~")):  # --alias NAME=/PATH
        return f"{name}={without_folders('/' + path)}"
    path = os.path.expanduser(value)
    if os.path.exists(path):
        return default_name(value)
    return os.path.basename(path.rstrip("/")) if os.path.isabs(path) else value
