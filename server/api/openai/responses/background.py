"""Responses that run in the background: a client may come and go, follow their events, and cancel them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from quire.server.api.openai.responses.answer import Answer
from quire.server.errors import EngineError
from quire.server.request.delta import Delta

Keep = Callable[[bytes | None], Awaitable[bytes]]  # stores the response with the events given; returns its JSON


class Run:
    """A response in the background. `events` are those so far; the n-th has sequence number n."""

    def __init__(
        self, owner: str, answer: Answer, generation: AsyncGenerator[Delta, None], keep: Keep, keep_events: bool
    ):
        self.id, self.owner, self.answer = answer.response.id, owner, answer
        self.generation, self.keep, self.keep_events = generation, keep, keep_events
        self.events: list[bytes] = []
        self.ended = False
        self._changed = asyncio.Event()
        self._interrupted: str | None = None
        self._generating = True
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda task: on_end())

    async def _work(self) -> None:
        told = self.answer.events(self.generation)
        try:
            async for events in told:
                self._publish(events)
        except asyncio.CancelledError:  # by `cancel` or `interrupt` only
            await told.aclose()
            if self._interrupted is None:
                self.answer.cancel()
            else:
                self.answer.fail(EngineError(self._interrupted))
        self._generating = False
        try:
            body = await self.keep(pack(self.events) if self.keep_events else None)
            self._publish([self.answer.last(body)])
        finally:
            self.ended = True
            self._publish([])

    def _publish(self, events: list[bytes]) -> None:
        self.events += events
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on, until the last."""
        while True:
            changed = self._changed
            if first < len(self.events):
                events, first = self.events[first:], len(self.events)
                yield b"".join(events)
            elif self.ended:
                return
            else:
                await changed.wait()

    def cancel(self) -> None:
        if self._generating:
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until the response has ended."""
        await asyncio.wait({self._task})

    async def interrupt(self, why: str) -> None:
        """End the response as failed."""
        self._interrupted = why
        self.cancel()
        await self.wait()


def pack(events: list[bytes]) -> bytes:
    return zlib.compress(b"".join(events), 1)


def unpack(packed: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in zlib.decompress(packed).split(b"\n\n")[:-1]]
