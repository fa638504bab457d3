"""Settings that the name of the model brings with it (`quire create`, Ollama's store): adapters, context, template."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.checkpoints import hub
from quire.checkpoints.library.applied import entry_of
from quire.checkpoints.library.entries import Entry
from quire.checkpoints.reading import read_object
from quire.configs.config import Config
from quire.server.startup.model_names import served_names
from quire.server.startup.task_adapters import task_modules

logger = logging.getLogger("quire")


def with_entry(config: Config) -> Config:
    """Return the settings with those that the model's name adds, and its adapters for tasks; a setting that was given
    stays. Raises ValueError.
    """
    options = config.model
    if tasks := task_modules(options.model, options.revision, options.download_dir):
        config = replace(config, lora=replace(config.lora, lora_modules=[*config.lora.lora_modules, *tasks]))
    if (entry := entry_of(config.model.model)) is None:
        return config
    if entry.adapters:
        name = served_names(config)[0]
        modules = [*config.lora.lora_modules, *_modules(name, entry)]
        config = replace(config, lora=replace(config.lora, lora_modules=modules))
    if entry.is_jinja and config.server.chat_template is None:
        config = replace(config, server=replace(config.server, chat_template=entry.template))
    length = entry.parameters.get("num_ctx")
    if isinstance(length, int) and length > 0 and config.model.max_model_len == "auto":
        config = replace(config, model=replace(config.model, max_model_len=str(_limited(length, config.model.model))))
    return config


def _modules(name: str, entry: Entry) -> list[str]:
    """Return the adapters as --lora-modules has them; requests for the model itself use them."""
    names = [f"{name}-adapter{i or ''}" for i in range(len(entry.adapters))]
    return [
        json.dumps({"name": one, "path": path, "default_scale": 1.0})
        for one, path in zip(names, entry.adapters, strict=True)
    ]


def _limited(length: int, model: str) -> int:
    """Return PARAMETER num_ctx, at most the context length that the model was trained for, if its files are here."""
    folder = hub.ready_folder(model)
    config: dict[str, Any] = read_object(Path(folder, "config.json")) if folder is not None else {}
    trained = (config.get("text_config") or config).get("max_position_embeddings")
    if isinstance(trained, int) and trained < length:
        logger.warning("%s: PARAMETER num_ctx %d is more than the model was trained for: %d", model, length, trained)
        return trained
    return length
