"""The answers of /v1/models for Anthropic's clients, which send the header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from quire.server.api import needs


class ModelInfo(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int | None = None


class ModelPage(msgspec.Struct, kw_only=True):
    data: list[ModelInfo]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def timestamp(seconds: int | None) -> str | None:
    """Return the time in the form of RFC 3339."""
    return seconds and datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def model_info(state: needs.Listing, name: str) -> ModelInfo:
    limit = state.model and state.model.max_model_len
    return ModelInfo(id=name, display_name=name, created_at=timestamp(state.created), max_input_tokens=limit)


def model_list(state: needs.Listing, names: list[str]) -> ModelPage:
    return ModelPage(
        data=[model_info(state, name) for name in names],
        first_id=names[0] if names else None,
        last_id=names[-1] if names else None,
    )
