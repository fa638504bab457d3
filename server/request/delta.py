"""The progress of one choice of a request, as generation makes it and dialects write it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.messages import TokenCounts, TokenLogprobs
from quire.server.parsers.events import Event


@dataclass(slots=True)
class Delta:
    """The progress of one choice. `token_ids` and `logprobs` (parallel) are the tokens whose text is complete with this
    delta's.

    `finish_reason`, on the last: stop (`stop_reason` is the stop string or stop token id, None for an end-of-sequence
    token), tool_calls (stop, after calls), length, abort, or error.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    counts: TokenCounts  # for the choice so far
    error: str | None
    error_kind: str = "engine"  # as in `EngineOutput`
    events: list[Event] | None = None  # events parsed from the text (`parse.py`)
    num_reasoning_tokens: int = 0  # among `token_ids`
