"""`--enable-log-requests`: a line in the log for every accepted request, as vLLM's, and its prompt at level debug."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

import msgspec

from quire.server.keys.caller import Caller

if TYPE_CHECKING:
    from quire.server.request.generation_request import GenerationRequest

logger = logging.getLogger("quire.requests")


class RequestLog:
    """Lines have numbers and names, never content; those of level debug have the prompt, its first `max_len`
    characters and token ids.
    """

    def __init__(self, max_len: int | None):
        self._max_len = max_len
        if not logger.isEnabledFor(logging.INFO):
            logger.warning("--enable-log-requests logs nothing: --log-level must be info or debug")

    def write(self, caller: Caller, key: str | None, route: str, requests: Sequence[GenerationRequest]) -> None:
        for one in requests:
            if logger.isEnabledFor(logging.DEBUG):
                text, ids = one.prompt_text, one.prompt_token_ids[: self._max_len]
                shown = None if text is None else text[: self._max_len]
                logger.debug("Request %s details: prompt: %r, prompt_token_ids: %s.", one.request_id, shown, ids)
            logger.info(
                "Received request %s (%s): %s, key: %s, prompt tokens: %d, images: %d, n: %d, priority: %d, "
                "params: %s, adapters: %s.",
                one.request_id,
                caller.request_id,
                route,
                key or "-",
                len(one.prompt_token_ids),
                len(one.media),
                one.n,
                one.priority,
                _redacted(one.sampling) if one.pooling is None else _redacted(one.pooling),
                ", ".join(use.adapter.name for use in one.adapters) or "-",
            )


def _redacted(params: msgspec.Struct) -> str:
    """Return the parameters that differ from their defaults: numbers as they are, the sizes of all others."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(params)}
    found = []
    for name, value in msgspec.structs.asdict(params).items():
        if value is None or value == defaults[name] or (isinstance(value, Sized) and not value):
            continue
        if isinstance(value, bool | int | float):
            found.append(f"{name}={value}")
        else:
            found.append(f"{name}=<{len(value)}>" if isinstance(value, Sized) else f"{name}=<set>")
    return ", ".join(found) or "-"
