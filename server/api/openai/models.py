"""The answers of /v1/models in OpenAI's form."""

from __future__ import annotations

from quire.server.api.openai.protocol import ModelCard, ModelList
from quire.server.startup.model_names import default_name
from quire.server.state import ServerState


def model_list(state: ServerState) -> ModelList:
    return ModelList(data=[model_card(state, name) for name in state.names])


def model_card(state: ServerState, name: str) -> ModelCard:
    root = default_name(state.config.model.model)  # not the operator's path
    return ModelCard(id=name, created=state.created, root=root, max_model_len=state.model and state.model.max_model_len)
