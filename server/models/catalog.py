"""The models that a server's settings name: on the command line, in a file, in a folder, in the Hub's cache."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.checkpoints.gguf.folder import gguf_names, is_first
from quire.checkpoints.library.installed import HUB, installed
from quire.configs.config import Config
from quire.configs.several import read_duration
from quire.configs.sources import EMBEDDED_MODEL, embedded_model
from quire.server.models.entry import ModelEntry, config_of
from quire.server.models.model_files import Described, read_models_file
from quire.server.startup.model_names import default_name

logger = logging.getLogger("quire")


def read_catalog(config: Config) -> list[ModelEntry]:
    """Return the models of a server, the first one first. Raises ValueError for two of one name, for an alias of none,
    and for a file or folder that cannot be read.
    """
    found = _described(config)
    if not found:
        raise ValueError("there is no model: give MODEL..., --models-file, --models-dir or --hub-cache")
    entries = [_entry(config, one) for one in found]
    names: dict[str, str] = {}
    for entry in entries:
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
    """The name of a model of the command line, which --served-model-name gives in their order."""
    names = config.server.served_model_name
    if position < len(names):
        return names[position]
    return EMBEDDED_MODEL.name if _source(source) == embedded_model() else None


def _source(text: str) -> str:
    if text == EMBEDDED_MODEL.name and not Path(text).exists():
        return embedded_model() or text
    return text


def _in_folder(folder: str) -> list[Described]:
    """The GGUF files and checkpoint folders of a folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"--models-dir {folder}: there is no such folder")
    found = []
    for one in sorted(path.iterdir()):
        where = f"--models-dir {folder}"
        if one.name.startswith((".", "mmproj")):
            continue
        if one.is_dir() and (one / "config.json").is_file():
            found.append(Described(one.name, str(one), where))
        elif one.is_dir():
            files = [file for file in gguf_names(sorted(file.name for file in one.iterdir())) if is_first(file)]
            files = [file for file in files if not file.startswith("mmproj")]
            several = len(files) > 1
            found += [
                Described(default_name(str(one / file)) if several else one.name, str(one / file), where)
                for file in files
            ]
        elif gguf_names([one.name]) and is_first(one.name):
            found.append(Described(None, str(one), where))
    if not found:
        raise ValueError(f"--models-dir {folder}: it has no GGUF file and no checkpoint folder")
    return found


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
