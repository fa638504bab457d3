"""The answers of /v1/models in OpenAI's form."""

from __future__ import annotations

from quire.server.api import needs
from quire.server.api.abilities import abilities
from quire.server.api.openai.objects import ModelCard, ModelList
from quire.server.startup.model_names import default_name


def model_list(state: needs.Listing, names: list[str]) -> ModelList:
    return ModelList(data=[model_card(state, name) for name in names])


def model_card(state: needs.Listing, name: str) -> ModelCard:
    known = {"max_model_len": state.model and state.model.max_model_len, "capabilities": abilities(state)}
    if (adapter := state.adapters.loaded.get(name)) is not None:
        parent = adapter.parent or state.names[0]
        return ModelCard(id=name, created=adapter.created, root=adapter.source.name, parent=parent, **known)
    root = default_name(state.config.model.model)  # not the operator's path
    return ModelCard(id=name, created=state.created, root=root, **known)
