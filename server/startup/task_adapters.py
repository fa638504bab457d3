"""The adapters that a model brings with it, one per task (jina-embeddings-v5)."""

from __future__ import annotations

import json
from pathlib import Path

from quire.checkpoints import hub
from quire.checkpoints.reading import read_object
from quire.checkpoints.rules import printable

ARCHITECTURE = "JinaEmbeddingsV5Model"
DEFAULT_TASK = "retrieval"  # of requests for the model itself
# a model of the Hub is only looked into before its download if its name says that it has tasks
_HUB_NAME = "jina-embeddings-v5"


def task_modules(model: str, revision: str | None, download_dir: str | None) -> list[str]:
    """Return the adapters of `model` as --lora-modules has them, none for other models. Blocks while those of a model
    of the Hub are downloaded. Raises ValueError.
    """
    folder = hub.ready_folder(model)
    if folder is None and _HUB_NAME in model:
        folder = hub.task_folder(model, revision, download_dir)
    if folder is None:
        return []
    path = Path(folder, "config.json")
    raw = read_object(path)
    if ARCHITECTURE not in (raw.get("architectures") or ()):
        return []
    return [
        json.dumps(
            {"name": task, "path": str(path.parent / "adapters" / task)}
            | ({"default_scale": 1.0} if task == DEFAULT_TASK else {})
        )
        for task in _checked(raw.get("task_names"), path)
    ]


def _checked(tasks: object, path: Path) -> list[str]:
    names = tasks if isinstance(tasks, list) else [None]
    if not all(isinstance(task, str) and task and Path(task).name == task != ".." for task in names):
        raise ValueError(f"{path}: task_names must list names of folders below adapters/, not {printable(tasks)}")
    return list(dict.fromkeys(names))
