"""One of several frontend processes: `python -m quire.server.frontends.member LISTENER CHANNEL`, both inherited file
descriptors. It exits when its stdin closes, because its parent has ended.

It has its own connection to every engine, and resubmits its own requests to a new engine. The parent (`parent.py`)
sends it the shared state and restarts it if it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from quire.configs import platforms
from quire.engine.messages import Progress, Ready
from quire.server.engines.client import EngineUnavailable
from quire.server.frontends.background_log import configure_logging
from quire.server.frontends.channel import Channel
from quire.server.frontends.frontend import Frontend
from quire.server.frontends.messages import (
    AdapterList,
    AdaptersChanged,
    Adopted,
    Busy,
    CannotStart,
    ChangeAdapters,
    Collect,
    Drain,
    Drained,
    Elsewhere,
    End,
    Engine,
    EngineGone,
    EngineLeaves,
    ExplainedDeath,
    Fail,
    Load,
    Loaded,
    Opened,
    Page,
    Phase,
    Ping,
    Pong,
    Scrape,
    Snapshot,
    Start,
    Suspects,
    ToFrontend,
    Turn,
)
from quire.server.heap import fix_mmap_threshold
from quire.server.lora.shared import Change, Refusal
from quire.server.request.sink import View

_PR_SET_PDEATHSIG = 1
BUSY_INTERVAL = 0.1  # seconds between reports of the number of open requests
MAX_QUEUED = 1 << 20  # unread bytes in the channel to the parent; above this, only its queries are answered
SNAPSHOT_INTERVAL = 1.0  # seconds between reports of the counts; later ones are lost if this process dies
SCRAPE_TIMEOUT = 5.0  # seconds for the parent to collect the counts of all frontends


class ManagedFrontend:
    """A `Frontend` controlled by messages from the parent."""

    def __init__(self, channel: Channel, start: Start, listener: socket.socket):
        self.channel = channel
        self.frontend = Frontend(start.config, listener, self._on_open)
        self.clients = self.frontend.connect(lambda engine, stats: None, self._on_progress)
        for client in self.clients:
            client.share(start.index, functools.partial(self._send_suspects, client.index))
        self.frontend.state.scrape = self._scrape
        self._scrapes: dict[int, asyncio.Future[bytes]] = {}
        self.frontend.state.adapters.ask = self._change_adapters
        self._changes: dict[int, asyncio.Future[Refusal | None]] = {}
        self._adapter_lists: asyncio.Queue[AdapterList] = asyncio.Queue()
        self._explained_deaths = [0] * len(self.clients)  # already reported to the parent
        self._numbers = itertools.count(1)
        self._background: set[asyncio.Task] = set()

    async def run(self) -> None:
        """Run until the parent sends `End`."""
        async with asyncio.TaskGroup() as self._tasks:
            self._start(self._report_busy())
            self._start(self._report_counts())
            self._start(self._adopt_adapters())
            self._tasks.create_task(self.frontend.serve())
            await self._listen()
            for task in list(self._background):
                task.cancel()
            await self.frontend.end()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the task group: if it fails, the process fails; `work` is cancelled at the end."""
        task = self._tasks.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _listen(self) -> None:
        while (message := await self.channel.receive()) is not None:
            match message:
                case Phase():
                    self.frontend.progress(message.phase, message.fraction)
                case Load():
                    self._start(self._load(message))
                case Engine():
                    await self.clients[message.index].connect(message.address)
                    self._start(self._open_when_ready(message.index))
                case EngineGone():
                    self._on_engine_gone(message)
                case EngineLeaves():
                    self.clients[message.index].on_leaving()
                case Turn():
                    self.clients[message.index].set_turn(message.frontend)
                case Elsewhere():
                    self._on_elsewhere(message)
                case Collect():
                    self.channel.send(Snapshot(message.number, self._counts()))
                case Ping():
                    self.channel.send(Pong())
                case Page():
                    if waiting := self._scrapes.pop(message.number, None):
                        waiting.set_result(message.text)
                case AdapterList():
                    self._adapter_lists.put_nowait(message)
                case AdaptersChanged():
                    if waiting := self._changes.pop(message.number, None):
                        waiting.set_result(message.refusal)
                case Drain():
                    self.frontend.refuse()
                    self._start(self._end_requests(self.frontend.drain))
                case Fail():
                    self._start(self._end_requests(functools.partial(self.frontend.fail, message.reason)))
                case End():
                    return

    # ---- start

    async def _load(self, message: Load) -> None:
        try:
            await self.frontend.load_tokenizer(message.model_folder, message.tokenizer_folder)
            self.channel.send(Loaded(self.frontend.chats))
        except ValueError as error:
            self.channel.send(CannotStart(str(error)))

    async def _open_when_ready(self, engine: int) -> None:
        with contextlib.suppress(EngineUnavailable):  # the engine died first; the parent starts another
            await self.clients[engine].wait_ready()
            self.frontend.open()

    def _on_progress(self, engine: int, progress: Progress) -> None:
        if engine == 0:
            self.frontend.progress(progress.phase, progress.fraction)

    def _on_open(self, ready: Ready) -> None:
        self.channel.send(Opened())

    # ---- running

    def _on_engine_gone(self, message: EngineGone) -> None:
        client = self.clients[message.index]
        client.on_dead(message.reason)
        if client.num_explained_deaths > self._explained_deaths[message.index]:
            self._explained_deaths[message.index] = client.num_explained_deaths
            self.channel.send(ExplainedDeath(message.index))
        self.frontend.on_death(message.index)

    def _send_suspects(self, engine: int, active: bool) -> None:
        self.channel.send(Suspects(engine, active))

    def _on_elsewhere(self, message: Elsewhere) -> None:
        for client, count in zip(self.clients, message.num_open, strict=True):
            client.num_elsewhere = count
        self.frontend.state.num_in_flight_elsewhere = message.num_in_flight

    async def _report_busy(self) -> None:
        last = Busy([0] * len(self.clients), 0)
        while True:
            await asyncio.sleep(BUSY_INTERVAL)
            busy = Busy(
                [client.num_open - client.num_background for client in self.clients], self.frontend.num_in_flight
            )
            if busy != last and not self._parent_stalls():
                self.channel.send(busy)
                last = busy

    async def _report_counts(self) -> None:
        last: list = []
        while True:
            await asyncio.sleep(SNAPSHOT_INTERVAL)
            counts = self._counts()
            if counts != last and not self._parent_stalls():
                self.channel.send(Snapshot(0, counts))
                last = counts

    def _parent_stalls(self) -> bool:
        """Return whether the parent is not reading. Periodic reports can then be skipped."""
        return self.channel.num_queued > MAX_QUEUED

    def _counts(self) -> list:
        metrics = self.frontend.state.metrics
        return [] if metrics is None else [metrics.for_engine(engine).counts() for engine in range(len(self.clients))]

    async def _scrape(self, view: View) -> bytes:
        """Return the metrics of all frontends. Raises TimeoutError if the parent does not answer."""
        number = next(self._numbers)
        waiting = self._scrapes[number] = asyncio.get_running_loop().create_future()
        self.channel.send(Scrape(number, view))
        try:
            return await asyncio.wait_for(waiting, SCRAPE_TIMEOUT)
        finally:
            self._scrapes.pop(number, None)

    async def _adopt_adapters(self) -> None:
        """Take over the lists of adapters in order. Raises ValueError: the parent then restarts this process."""
        while True:
            message = await self._adapter_lists.get()
            await self.frontend.state.adapters.adopt(message.listing)
            self.channel.send(Adopted(message.number))

    async def _change_adapters(self, change: Change) -> None:
        """Have the parent change the adapters of all frontends. Raises ApiError."""
        number = next(self._numbers)
        waiting = self._changes[number] = asyncio.get_running_loop().create_future()
        self.channel.send(ChangeAdapters(number, change))
        try:
            if (refusal := await waiting) is not None:
                raise refusal.error()
        finally:
            self._changes.pop(number, None)

    # ---- shutdown

    async def _end_requests(self, ending: Callable[[], Awaitable[None]]) -> None:
        await ending()
        self.channel.send(Snapshot(0, self._counts()))
        self.channel.send(Drained())


async def _run(listener: socket.socket, end: socket.socket) -> None:
    channel = await Channel.open(end, ToFrontend)
    start = await channel.receive()
    if start is None:
        return
    configure_logging(start.config.server, f"server {start.index}")
    platforms.name_process(f"quire-api-{start.index}")
    await ManagedFrontend(channel, start, listener).run()
    channel.close()


def _end_with_parent() -> None:
    platforms.signal_at_parents_end(signal.SIGKILL)  # even if this process is stopped, or native code holds the GIL
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> None:
    """Run a frontend process. It ignores signals: only the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    fix_mmap_threshold()
    listener, end = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    listener.setblocking(False)
    asyncio.run(_run(listener, end))


if __name__ == "__main__":
    main()
