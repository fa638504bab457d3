"""How much of the prompts of one request is in the KV cache, told in comments of its event stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class PrefillProgress:
    """Of all prompts together; the choices of a prompt count once. Written by the `Generation`s, read by the stream.

    `totals` has the tokens of each prompt, by its request.
    """

    def __init__(self, totals: Mapping[str, int]):
        self._totals = totals
        self._done: dict[str, int] = {}
        self._changed = asyncio.Event()

    def note(self, prompt: str, num_tokens: int) -> None:
        """`num_tokens` of the prompt of request `prompt` are computed or were found in the prefix cache."""
        if num_tokens > self._done.get(prompt, 0):
            self._done[prompt] = num_tokens
            self._changed.set()

    def note_first_token(self, prompt: str) -> None:
        """The whole prompt is computed."""
        self.note(prompt, self._totals[prompt])

    async def wait(self) -> None:
        """Until there is something to tell."""
        await self._changed.wait()

    def take(self) -> bytes:
        """The comment to send, such as `: prefill 4096/32768`; empty if nothing changed since the last."""
        if not self._changed.is_set():
            return b""
        self._changed.clear()
        return b": prefill %d/%d\n\n" % (sum(self._done.values()), sum(self._totals.values()))
