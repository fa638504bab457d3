"""Facts about the files of a model that does not have to be loaded."""

from __future__ import annotations

import contextlib
from typing import Any

from quire.checkpoints import hub
from quire.server.api.ollama import models as ollama_models
from quire.server.engines.supervisor import in_thread
from quire.server.models.loaded import Model
from quire.server.models.need import Planned
from quire.server.startup.model_details import LazyDetails, ModelDetails


async def details_of(model: Model) -> ModelDetails | None:
    """Return the details of a model's files; None while they are not on this machine, or cannot be read."""
    if model.details is None:
        with contextlib.suppress(ValueError):
            if (folder := await in_thread(lambda: hub.ready_folder(model.entry.source))) is not None:
                model.details = LazyDetails(folder)
    if model.details is None:
        return None
    try:
        return await model.details.get()
    except (ValueError, OSError):
        return None


def show_answer(details: ModelDetails, model: Model, planned: Planned | None, abilities: list[str]) -> dict[str, Any]:
    """Return the answer of /api/show for a model that is not loaded."""
    more = {} if planned is None else {f"{details.family}.context_length": planned.max_model_len}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": ollama_models.details(details, model.state),
        "model_info": details.metadata | more,
        "capabilities": abilities,
        "modified_at": ollama_models.listed(model.name, details, model.state)["modified_at"],
    }
