"""Progress of a request's prompts in the KV cache, reported in its stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.engine.messages import TokenCounts
from quire.server.errors import BadRequest


class Prompted(Protocol):
    """A `GenerationRequest`."""

    request_id: str
    prompt_token_ids: list[int]
    progress: PrefillProgress | None


class PromptProgress(msgspec.Struct, kw_only=True):
    """Tokens of all prompts together, under llama.cpp's names."""

    total: int
    cache: int  # found in the prefix cache
    processed: int  # computed, or cached
    time_ms: float  # since the request was prepared


def comment(now: PromptProgress) -> bytes:
    """Return a comment of an event stream, such as `: prefill 4096/32768`."""
    return b": prefill %d/%d\n\n" % (now.processed, now.total)


class PrefillProgress:
    """The progress of all prompts together; the choices of a prompt count once. Written by the `Generation`s, read by
    the stream. `write` makes the frame that is sent.
    """

    def __init__(self, requests: Sequence[Prompted], write: Callable[[PromptProgress], bytes]):
        self._totals = {one.request_id: len(one.prompt_token_ids) for one in requests}
        self._write = write
        self._done: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._started = time.monotonic()
        self._changed = asyncio.Event()

    def note(self, prompt: str, counts: TokenCounts) -> None:
        """Take the counts of the prompt of request `prompt`, of which a part is computed."""
        self._note(prompt, counts.prefilled, counts.cached)

    def record_first_token(self, prompt: str, counts: TokenCounts) -> None:
        """Record that the whole prompt is computed."""
        self._note(prompt, self._totals[prompt], counts.cached)

    def _note(self, prompt: str, num_tokens: int, num_cached: int) -> None:
        if num_tokens > self._done.get(prompt, 0):
            self._done[prompt] = num_tokens
            self._cached[prompt] = num_cached
            self._changed.set()

    async def wait(self) -> None:
        """Wait until there is progress to report."""
        await self._changed.wait()

    def take(self) -> bytes:
        """Return the frame to send; empty if nothing changed since the last."""
        if not self._changed.is_set():
            return b""
        self._changed.clear()
        now = PromptProgress(
            total=sum(self._totals.values()),
            cache=sum(self._cached.values()),
            processed=sum(self._done.values()),
            time_ms=round((time.monotonic() - self._started) * 1000, 3),
        )
        return self._write(now)


def check_progress(wanted: bool | None, streams: bool | None) -> None:
    """Raise BadRequest for a `return_progress` without a stream that could report it."""
    if wanted and not streams:
        raise BadRequest("return_progress needs stream to be true.", param="return_progress")


def report_progress(
    wanted: bool | None, requests: Sequence[Prompted], write: Callable[[PromptProgress], bytes] = comment
) -> PrefillProgress | None:
    """Return the reports of these requests, for their stream; None if they are not `wanted`."""
    if not wanted:
        return None
    progress = PrefillProgress(requests, write)
    for one in requests:
        one.progress = progress
    return progress
