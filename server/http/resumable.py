"""Event streams that outlive their connection: a client that names its stream may come back for the rest.

The request of such a stream outlives its connection, so that cleanup at its end still happens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice

from starlette.types import Receive, Scope, Send

from quire.server.errors import BadRequest, NotFound
from quire.server.http.sse import EventStream, Progress, event

HEADER = "X-Resumable-Stream"
ABANDONED_AFTER = 60.0  # seconds without a reader, after which a stream is aborted, or forgotten if it has ended
MAX_BYTES = 512 * 1024  # for the events kept of one stream
MAX_STREAMS, MAX_STREAMS_OF_ONE = 256, 16  # kept, in all and of one API key (without keys, of one address)
_BATCH = 64  # events sent at once


class Kept:
    """The events of one stream, numbered from 1. The oldest are evicted once a reader was sent them; while no reader
    takes them, a full store asks for no more.
    """

    def __init__(self, turn: str):
        self.turn = turn
        self.ended = False
        self._events: deque[bytes] = deque()
        self._first = 1  # number of the oldest event
        self._size = 0
        self._sent = 0  # number of the newest event that a reader was sent
        self._num_readers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def first(self) -> int:
        return self._first

    def start(self, frames: AsyncGenerator[bytes, None]) -> asyncio.Task[None]:
        """Start a task that stores the events of `frames`."""
        self._task = asyncio.create_task(self._fill(frames))
        return self._task

    def stop(self) -> None:
        """End the stream after the events received so far."""
        if self._task is not None:
            self._task.cancel()

    async def _fill(self, frames: AsyncGenerator[bytes, None]) -> None:
        try:
            async for frame in frames:
                for one in frame.split(b"\n\n")[:-1]:
                    self._events.append(b"id: %d\n%b\n\n" % (self._first + len(self._events), one))
                    self._size += len(self._events[-1])
                self._notify()
                await self._make_room()
        finally:
            self.ended = True
            self._notify()
            await frames.aclose()

    async def _make_room(self) -> None:
        while self._size > MAX_BYTES:
            if self._first <= self._sent:
                self._size -= len(self._events.popleft())
                self._first += 1
            else:
                await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events with numbers above `after`, until the last."""
        self._num_readers += 1
        try:
            while True:
                changed, begin = self._changed, after + 1 - self._first
                if begin < 0:  # another reader advanced further
                    yield event(expired(self._first).body())
                    return
                if batch := list(islice(self._events, begin, begin + _BATCH)):
                    yield b"".join(batch)
                    after += len(batch)
                    self._sent = max(self._sent, after)
                    self._notify()
                elif self.ended:
                    return
                else:
                    await changed.wait()
        finally:
            self._num_readers -= 1
            self._notify()

    async def abandoned(self) -> None:
        """Wait until there was no reader for `ABANDONED_AFTER` seconds."""
        while True:
            changed = self._changed
            if self._num_readers:
                await changed.wait()
                continue
            try:
                async with asyncio.timeout(ABANDONED_AFTER):
                    while not self._num_readers:
                        await self._changed.wait()
            except TimeoutError:
                return


class Streams:
    """The resumable streams of a server process, by owner and name."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Kept] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, owner_: str, name: str, turn: str) -> Kept | None:
        """Keep a new stream; None if there are too many. Raises BadRequest if the name is taken."""
        if (owner_, name) in self._kept:
            raise BadRequest(f"{HEADER}: a stream with this name is there already.", param=HEADER)
        self._forget_one_ended(turn)
        num_own = sum(one.turn == turn for one in self._kept.values())
        if len(self._kept) >= MAX_STREAMS or num_own >= MAX_STREAMS_OF_ONE:
            return None
        kept = self._kept[owner_, name] = Kept(turn)
        watch = asyncio.create_task(self._forget_when_abandoned((owner_, name), kept))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return kept

    def get(self, owner_: str, name: str) -> Kept:
        """Return a stream. Raises NotFound."""
        if (kept := self._kept.get((owner_, name))) is None:
            raise NotFound(f"No stream named '{name[:100]}' is kept.", param="stream_id")
        return kept

    def stop(self, owner_: str, name: str) -> None:
        """End a stream, if it exists."""
        if (kept := self._kept.get((owner_, name))) is not None:
            kept.stop()

    def _forget_one_ended(self, turn: str) -> None:
        """Forget the oldest ended stream of a client that has used up its share."""
        own = [key for key, one in self._kept.items() if one.turn == turn]
        if len(own) >= MAX_STREAMS_OF_ONE:
            for key in own:
                if self._kept[key].ended:
                    del self._kept[key]
                    return

    async def _forget_when_abandoned(self, key: tuple[str, str], kept: Kept) -> None:
        await kept.abandoned()
        kept.stop()
        if self._kept.get(key) is kept:
            del self._kept[key]


class ResumableStream(EventStream):
    """Sends the events of a `Kept`, and stays until they end, even after the client has left."""

    def __init__(
        self, kept: Kept, frames: AsyncGenerator[bytes, None], keep_alive: float, progress: Progress | None = None
    ):
        super().__init__(kept.follow(0), keep_alive, progress)
        self.kept, self.source = kept, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        filling = self.kept.start(self.source)
        try:
            await super().__call__(scope, receive, send)
            await asyncio.wait({filling})
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)


def expired(first: int) -> NotFound:
    """Return the error for events before number `first`."""
    return NotFound(f"Events before number {first} are no longer kept.", param="Last-Event-ID", code="events_gone")
