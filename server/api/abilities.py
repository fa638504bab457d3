"""Ollama's names for the abilities of a model."""

from __future__ import annotations

from quire.server.api import needs
from quire.server.text.infill import infill_of


def abilities(state: needs.Prompting) -> list[str]:
    """Return the abilities of the served model; none are known while it loads."""
    if state.model is None:
        return []
    pooling, formats = state.model.pooling, state.formats
    if state.model.transcribes:
        return ["transcription"]
    found = ["embedding"] if pooling is not None and pooling.tasks else []
    if pooling is not None and not pooling.generates:
        return found
    found += ["completion"]
    found += ["insert"] if infill_of(state.tokenizer) is not None else []
    found += ["tools"] if formats.tools else []
    found += ["thinking"] if formats.reasoning else []
    return found + (["vision"] if state.images.why_not is None else [])
