"""The models that a server's settings name: on the command line, in a file, in a folder, in the Hub's cache."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.checkpoints.gguf.folder import gguf_names, is_first
from quire.checkpoints.library.installed import HUB, installed
from quire.configs.config import Config
from quire.configs.options import is_utf8
from quire.configs.several import read_duration
from quire.configs.sources import EMBEDDED_MODEL, embedded_model
from quire.server.models.entry import ModelEntry, config_of
from quire.server.models.model_files import Described, read_models_file
from quire.server.startup.model_names import default_name

logger = logging.getLogger("quire")


def read_catalog(config: Config) -> list[ModelEntry]:
    """Return the models of a server, the first one first. Raises ValueError for duplicate names, for an alias without a
    model, and for a file or folder that cannot be read.
    """
    found = _described(config)
    if not found:
        raise ValueError("there is no model: give MODEL..., --models-file, --models-dir or --hub-cache")
    entries = [_entry(config, one) for one in found]
    names: dict[str, str] = {}
    for entry in entries:
        if entry.config.parallel.names_machines:
            raise ValueError(
                f"{entry.where}: a server of several models has all engines on its machine: leave out "
                "--nnodes and --data-parallel-size-local"
            )
        for name in (entry.name, *entry.aliases):
            if name in names:
                raise ValueError(f"{entry.where}: the model name {name} is taken by {names[name]}")
            names[name] = entry.where
    return entries


def _described(config: Config) -> list[Described]:
    command = [one for one in (config.model.model, *config.models.models) if one]
    found = [Described(_own_name(config, i, one), _source(one), "the command line") for i, one in enumerate(command)]
    if config.models.models_file is not None:
        found += read_models_file(config.models.models_file)
    if config.models.models_dir is not None:
        found += _in_folder(config.models.models_dir)
    if config.models.hub_cache:
        known = {one.source for one in found}
        found += [
            Described(one.name, one.name, "the Hub's cache")
            for one in sorted(installed(), key=lambda one: one.name)
            if one.source == HUB and one.name not in known
        ]
    for one in found:
        for warning in one.warnings:
            logger.warning("%s", warning)
    _add_aliases(config.models.alias, found)
    return found


def _own_name(config: Config, position: int, source: str) -> str | None:
    """Return the --served-model-name of the model at `position` on the command line."""
    names = config.server.served_model_name
    if position < len(names):
        return names[position]
    return EMBEDDED_MODEL.name if _source(source) == embedded_model() else None


def _source(text: str) -> str:
    if text == EMBEDDED_MODEL.name and not Path(text).exists():
        return embedded_model() or text
    return text


def _in_folder(folder: str) -> list[Described]:
    """Return the GGUF files and checkpoint folders of a folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"--models-dir {folder}: there is no such folder")
    where = f"--models-dir {folder}"
    found: list[Described] = []
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from None
    for one in inside:
        try:
            found += _found_at(one, where)
        except OSError as error:
            logger.warning("%s: %s is left out: %s", where, one.name, error.strerror)
    if not found:
        raise ValueError(f"{where}: it has no GGUF file and no checkpoint folder")
    return found


def _found_at(path: Path, where: str) -> list[Described]:
    """Return the models of a file or folder in a folder of models. Raises OSError."""
    if path.name.startswith((".", "mmproj")):
        return []
    if path.is_dir() and (path / "config.json").is_file():
        return [Described(path.name, str(path), where)] if _is_usable(path, where) else []
    if not path.is_dir():
        is_one = bool(gguf_names([path.name])) and is_first(path.name) and _is_usable(path, where)
        return [Described(None, str(path), where)] if is_one else []
    names = gguf_names(sorted(file.name for file in path.iterdir()))
    files = [path / name for name in names if is_first(name) and not name.startswith("mmproj")]
    files = [file for file in files if _is_usable(file, where)]
    several = len(files) > 1
    return [Described(default_name(str(file)) if several else path.name, str(file), where) for file in files]


def _is_usable(path: Path, where: str) -> bool:
    """Return whether a model can be read and named; warns otherwise."""
    reason = "its name is not UTF-8" if not is_utf8(str(path)) else "" if path.is_dir() or path.is_file() else "no file"
    if reason:
        logger.warning("%s: %s is left out: %s", where, ascii(path.name), reason)
    return not reason


def _add_aliases(given: list[str], found: list[Described]) -> None:
    """Add the aliases of --alias. Raises ValueError for one without a model."""
    for text in given:
        alias, equals, name = text.partition("=")
        if not equals or not alias or not name:
            raise ValueError(f"--alias {text}: with several models it must be NAME=MODEL")
        target = next((one for one in found if name in (_name(one), one.source)), None)
        if target is None:
            raise ValueError(f"--alias {text}: there is no model {name}; there are {', '.join(map(_name, found))}")
        target.aliases = [*target.aliases, alias]


def _name(one: Described) -> str:
    return one.name or default_name(one.source)


def _entry(config: Config, one: Described) -> ModelEntry:
    keep_alive = read_duration(config.models.keep_alive) if one.keep_alive is None else one.keep_alive
    source, name = _source(one.source), _name(one)
    return ModelEntry(
        name,
        source,
        config_of(config, name, source, one.values),
        tuple(dict.fromkeys(one.aliases)),
        one.pinned,
        keep_alive,
        one.where,
    )
