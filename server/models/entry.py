"""One model of a multi-model server, as its settings describe it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.configs.config import Config
from quire.configs.options import all_options
from quire.configs.several import FOREVER, ModelsConfig


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model. `config` has the flags of the command line and then the model's own. `keep_alive` is in seconds after
    the last request. A `pinned` model loads at start and stays.
    """

    name: str
    source: str  # folder, GGUF file, Hub id or a name of the library
    config: Config
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    keep_alive: float = FOREVER
    where: str = "the command line"  # where it is described, for messages


def config_of(base: Config, name: str, source: str, values: Mapping[str, Any]) -> Config:
    """Return `base` for one model, with the settings `values` by name."""
    own = {**values, "model": source, "served_model_name": [name]}
    sections: dict[str, dict[str, Any]] = {"models": {}}
    for setting, value in own.items():
        sections.setdefault(all_options()[setting].section, {})[setting] = value
    changed = {
        section: dataclasses.replace(getattr(base, section), **values) for section, values in sections.items() if values
    }
    return dataclasses.replace(base, **changed, models=ModelsConfig())
