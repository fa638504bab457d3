"""The answers of /v1/models in OpenAI's form."""

from __future__ import annotations

import os

from quire.server.api.openai.protocol import ModelCard, ModelList
from quire.server.state import ServerState


def model_list(state: ServerState) -> ModelList:
    return ModelList(data=[model_card(state, name) for name in state.names])


def model_card(state: ServerState, name: str) -> ModelCard:
    model = state.config.model.model
    # do not reveal the operator's paths
    root = os.path.basename(os.path.normpath(model)) if os.path.isabs(model) else model
    return ModelCard(id=name, created=state.created, root=root, max_model_len=state.model and state.model.max_model_len)
