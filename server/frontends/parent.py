"""The parent's side of several frontend processes on one port (`--api-server-count`). The parent owns the engines; it
starts the frontends, broadcasts state to them, restarts those that die, and aggregates their metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Progress, Ready
from quire.server.engines.client import EngineClient
from quire.server.engines.pool import EnginePool
from quire.server.engines.process import describe_exit
from quire.server.engines.spawn import python_environment
from quire.server.engines.supervisor import DEATH_WINDOW, MAX_DEATHS, START_RETRY, in_thread
from quire.server.engines.turns import Turns
from quire.server.errors import ApiError
from quire.server.frontends.channel import Channel
from quire.server.frontends.descriptors import BACKLOG
from quire.server.frontends.http_side import END_TIMEOUT
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
    FromFrontend,
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
    Turn,
)
from quire.server.lora.adapters import Adapters
from quire.server.lora.shared import Refusal, listing, make
from quire.server.metrics.metrics import Counts, Metrics
from quire.server.metrics.pool import MetricsPool, make_metrics
from quire.server.request.sink import ALL, View
from quire.server.startup.model_names import served_names

logger = logging.getLogger("quire")

COLLECT_TIMEOUT = 2.0  # seconds for a frontend to send its counts; after that, its last counts are used
PING_INTERVAL = 1.0  # seconds
STALL_TIMEOUT = 10.0  # seconds without a `Pong` after which a frontend is killed and restarted
MAX_QUEUED = 64 << 20  # unread bytes in a channel after which its frontend also counts as stalled
EXIT_TIMEOUT = 5.0  # seconds for a frontend to exit after `End`


class FrontendFailed(ValueError):
    """A frontend cannot be started, or keeps dying."""


class FrontendProcess:
    """One frontend: its listener, its counts, and its current process."""

    def __init__(self, index: int, listener: socket.socket, num_engines: int):
        self.index, self.listener, self.num_engines = index, listener, num_engines
        self.process: subprocess.Popen | None = None
        self.channel: Channel | None = None
        self.deaths: list[float] = []
        self.loaded, self.opened, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reset()

    def reset(self) -> None:
        """Forget the reports of the last process."""
        self.num_open = [0] * self.num_engines
        self.num_in_flight = 0
        self.counts: list[Counts] = []  # per engine, as last reported
        self.is_watched = False  # once it has loaded everything, its event loop must not block
        self.silence = 0.0  # seconds since it answered a `Ping`
        self.stalled: str | None = None  # reason for killing it

    async def start(self, config: Config) -> None:
        """Start a process in its own process group, so that Ctrl-C reaches only the parent.

        Raises OSError if the system has no descriptors, memory or processes left.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (self.listener.fileno(), theirs.fileno())
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "quire.server.frontends.member", *map(str, descriptors)],
                    stdin=subprocess.PIPE,
                    pass_fds=descriptors,
                    env=python_environment(),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        self.channel = await Channel.open(ours, FromFrontend)
        self.channel.send(Start(config, self.index))

    def send(self, message: msgspec.Struct) -> None:
        if self.channel is not None and self.stalled is None:
            self.channel.send(message)
            if self.channel.num_queued > MAX_QUEUED:
                self.kill_stalled(f"it stalled: {self.channel.num_queued} unread bytes in its channel")

    def ping(self) -> None:
        """Ping every PING_INTERVAL seconds. Calls are counted, not time, so that stalls of the parent do not count."""
        if self.is_watched and self.stalled is None:
            if self.silence >= STALL_TIMEOUT:
                self.kill_stalled(f"it stalled: no answer for {self.silence:.0f} seconds")
            self.silence += PING_INTERVAL
            self.send(Ping())

    def kill_stalled(self, reason: str) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self.stalled = reason
        self.kill()

    async def wait(self) -> int:
        """Wait for the process to exit, close its channel, and return its exit code."""
        code = await in_thread(self.process.wait)
        self.channel.close()
        self.process.stdin.close()
        self.channel = None
        return code

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


class FrontendGroup:
    """Several frontend processes, as one `FrontendHandle`. `on_open` is called when all serve for the first time."""

    def __init__(self, config: Config, listener: socket.socket, on_open: Callable[[Ready], None]):
        self.config, self.on_open = config, on_open
        count, num_engines = config.server.api_server_count, config.parallel.data_parallel_size
        self.frontends = [FrontendProcess(index, one, num_engines) for index, one in enumerate(share(listener, count))]
        self.addresses: list[str | None] = [None] * num_engines  # addresses of the running engines
        self.phase: Phase | None = None
        self.load: Load | None = None
        self.adapters = Adapters(config)
        self.adapter_list: AdapterList | None = None  # as last sent
        self.metrics: Metrics | MetricsPool | None = None  # metrics of the engines and of ended frontend processes
        self.ending = False
        self._pool: EnginePool | None = None  # our connections to the engines: they receive status only
        self._explained = [False] * num_engines  # per engine: whether its last death was counted as explained
        self._turns = [Turns() for _ in range(num_engines)]
        self.chats = False  # whether the model has a chat template; set when a frontend has loaded it
        self._ready: Ready | None = None  # set when all engines are ready for the first time
        self._refusals: asyncio.Queue[str] = asyncio.Queue()  # reasons of frontends that cannot start
        # number of the `Collect` -> frontends that have not answered yet
        self._collections: dict[int, tuple[set[int], asyncio.Event]] = {}
        self._numbers = itertools.count(1)
        self._answering: set[asyncio.Task] = set()
        self._running: list[asyncio.Task] = []

    @property
    def num_in_flight(self) -> int:
        """Return the number of HTTP requests being answered by all frontends, as last reported (BUSY_INTERVAL)."""
        return sum(frontend.num_in_flight for frontend in self.frontends)

    def broadcast(self, message: msgspec.Struct) -> None:
        """Send to every running frontend."""
        for frontend in self.frontends:
            frontend.send(message)

    # ---- the processes

    async def serve(self) -> None:
        """Run the frontends until `end`. Raises FrontendFailed; the other frontends keep running."""
        self._running = [asyncio.create_task(self._run_frontend(frontend)) for frontend in self.frontends]
        refused, pinging = asyncio.create_task(self._refusals.get()), asyncio.create_task(self._ping())
        try:
            done, _ = await asyncio.wait({refused, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            if refused in done:
                raise FrontendFailed(refused.result())
            await asyncio.gather(*self._running)
        finally:
            refused.cancel()
            pinging.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL)
            for frontend in self.frontends:
                frontend.ping()

    async def _run_frontend(self, frontend: FrontendProcess) -> None:
        """Start the process of one frontend, and restart it until `end`. Raises FrontendFailed."""
        while not self.ending:
            try:
                await frontend.start(self.config)
            except OSError as error:
                self._check_restarts(frontend, f"not started: {error.strerror}")
                await asyncio.sleep(START_RETRY)
                continue
            self._sync(frontend)
            await self._listen(frontend)
            code = await frontend.wait()
            reason = frontend.stalled or describe_exit(code)
            self._remove(frontend)
            if not self.ending:
                self._check_restarts(frontend, reason)
        frontend.drained.set()

    def _sync(self, frontend: FrontendProcess) -> None:
        """Send a new process the current state."""
        for message in (
            self.phase,
            self.load,
            self.adapter_list,
            *(Turn(index, turns.holder) for index, turns in enumerate(self._turns)),
            *(Engine(index, address) for index, address in enumerate(self.addresses) if address is not None),
            *(EngineLeaves(one.index) for one in (self._pool.clients if self._pool else ()) if one.is_leaving),
        ):
            if message is not None:
                frontend.send(message)
        if self.ending:
            frontend.send(Drain())
        self._share_load()

    def _remove(self, frontend: FrontendProcess) -> None:
        """Keep the counts of a process that ended, and clear its load."""
        if self.metrics is not None:
            for engine, counts in enumerate(frontend.counts):
                self.metrics.for_engine(engine).add(counts)
        for engine in range(frontend.num_engines):
            self._record_suspects(engine, frontend, False)
        frontend.reset()
        self._update_load()
        for number in list(self._collections):
            self._record_answer(number, frontend)
        self._share_load()

    def _check_restarts(self, frontend: FrontendProcess, reason: str) -> None:
        """Raise FrontendFailed if the frontend died too often to be restarted."""
        now = time.monotonic()
        frontend.deaths = [death for death in frontend.deaths if now - death < DEATH_WINDOW] + [now]
        if len(frontend.deaths) >= MAX_DEATHS:
            raise FrontendFailed(
                f"frontend {frontend.index} died {len(frontend.deaths)} times within {DEATH_WINDOW:.0f} seconds, most "
                f"recently: {reason}"
            )
        logger.error("frontend %d died (%s); restarting it; its connections are lost", frontend.index, reason)

    async def _listen(self, frontend: FrontendProcess) -> None:
        while (message := await frontend.channel.receive()) is not None:
            match message:
                case Loaded():
                    self.chats = message.chats
                    frontend.loaded.set()
                    frontend.is_watched = True
                case Pong():
                    frontend.silence = 0.0
                case CannotStart():
                    self._refusals.put_nowait(message.reason)
                case Opened():
                    self._on_opened(frontend)
                case Busy():
                    frontend.num_open, frontend.num_in_flight = message.num_open, message.num_in_flight
                    self._update_load()
                    self._share_load()
                case ExplainedDeath():
                    self._count_explained_death(message.index)
                case Suspects():
                    self._record_suspects(message.index, frontend, message.active)
                case Snapshot():
                    frontend.counts = message.counts
                    self._record_answer(message.number, frontend)
                case Adopted():
                    self._record_answer(message.number, frontend)
                case Scrape():
                    self._answer(self._answer_scrape(frontend, message))
                case ChangeAdapters():
                    self._answer(self._answer_change(frontend.channel, message))
                case Drained():
                    frontend.drained.set()

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _share_load(self) -> None:
        for frontend in self.frontends:
            others = [other for other in self.frontends if other is not frontend]
            frontend.send(
                Elsewhere(
                    [sum(counts) for counts in zip(*(other.num_open for other in others))],
                    sum(other.num_in_flight for other in others),
                )
            )

    # ---- start

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Return when every frontend has loaded the tokenizer."""
        self.load = Load(model_folder, tokenizer_folder)
        self.broadcast(self.load)
        if self.adapters.enabled:
            await self.adapters.open(self._pool)
            await self._share_adapters()
        for frontend in self.frontends:
            await frontend.loaded.wait()

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """Connect as `Frontend.connect`. Each new engine and each death is broadcast to the frontends."""
        clients = [
            EngineClient(
                functools.partial(on_stats, engine),
                functools.partial(on_progress, engine),
                engine,
                on_connect=functools.partial(self._announce_engine, engine),
                on_death=functools.partial(self._announce_death, engine),
                on_leaving=functools.partial(self._announce_leaving, engine),
            )
            for engine in range(len(self.addresses))
        ]
        self._pool = EnginePool(clients)
        return clients

    def _announce_engine(self, engine: int, address: str) -> None:
        self.addresses[engine] = address
        self.broadcast(Engine(engine, address))

    def _announce_leaving(self, engine: int) -> None:
        self.broadcast(EngineLeaves(engine))

    def _announce_death(self, engine: int, reason: str) -> None:
        self._explained[engine] = False
        self.addresses[engine] = None
        self.broadcast(EngineGone(engine, reason))

    def _count_explained_death(self, engine: int) -> None:
        """Count a death once, even if several frontends report it."""
        self._pool.clients[engine].num_explained_deaths += not self._explained[engine]
        self._explained[engine] = True

    def _record_suspects(self, engine: int, frontend: FrontendProcess, active: bool) -> None:
        if self._turns[engine].note(frontend.index, active):
            self.broadcast(Turn(engine, self._turns[engine].holder))

    def _update_load(self) -> None:
        """Update the load of each engine: the sum over the frontends."""
        for client in self._pool.clients if self._pool is not None else ():
            client.num_elsewhere = sum(frontend.num_open[client.index] for frontend in self.frontends)

    def progress(self, phase: str, fraction: float) -> None:
        if self.phase is None or phase != self.phase.phase or fraction - self.phase.fraction >= 0.01:
            self.phase = Phase(phase, fraction)
            self.broadcast(self.phase)

    def open(self) -> None:
        """Note that an engine is ready. The frontends notice that themselves."""
        if self._ready is None and self._pool.ready is not None:
            self._ready = self._pool.ready
            self.metrics = make_metrics(self.config, served_names(self.config)[0], self._ready.worker)
            self._announce_when_open()

    def _on_opened(self, frontend: FrontendProcess) -> None:
        first = not frontend.opened.is_set()
        frontend.opened.set()
        if first:
            self._announce_when_open()

    def _announce_when_open(self) -> None:
        if self._ready is not None and all(frontend.opened.is_set() for frontend in self.frontends):
            self.on_open(self._ready)

    # ---- running

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Publish the statistics as `Frontend.observe_stats`."""
        if self.metrics is not None:
            self.metrics.for_engine(engine).observe_stats(stats)

    def on_death(self, engine: int) -> None:
        """Do nothing: `_announce_death` has notified the frontends."""

    async def _answer_scrape(self, frontend: FrontendProcess, message: Scrape) -> None:
        frontend.send(Page(message.number, await self.render_metrics(message.view)))

    async def render_metrics(self, view: View = ALL) -> bytes:
        """Return the engines' statistics, and the sum of the counts of all frontends, past and present."""
        await self._collect()
        if self.metrics is None:
            return b""
        pages = [
            self.metrics.for_engine(engine).plus(
                frontend.counts[engine] for frontend in self.frontends if frontend.counts
            )
            for engine in range(len(self.addresses))
        ]
        return await in_thread(functools.partial(MetricsPool(pages).render, view))

    async def _collect(self) -> None:
        """Ask every frontend for its counts; one that does not answer in time keeps its last ones."""
        number = next(self._numbers)
        complete = self._expect_answers(number)
        self.broadcast(Collect(number))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), COLLECT_TIMEOUT)
        del self._collections[number]

    def _expect_answers(self, number: int) -> asyncio.Event:
        """Return an event set when every running frontend has answered message `number`, or has ended."""
        asked = {frontend.index for frontend in self.frontends if frontend.channel is not None}
        _, complete = self._collections[number] = (asked, asyncio.Event())
        if not asked:
            complete.set()
        return complete

    def _record_answer(self, number: int, frontend: FrontendProcess) -> None:
        if number in self._collections:
            asked, complete = self._collections[number]
            asked.discard(frontend.index)
            if not asked:
                complete.set()

    # ---- LoRA adapters

    async def _answer_change(self, channel: Channel, message: ChangeAdapters) -> None:
        """Change the adapters, and answer when every frontend serves the new ones."""
        held = list(self.adapters.loaded.values())  # keeps the files of removed adapters until all copies are made
        refusal = None
        try:
            await make(message.change, self.adapters, self._pool, served_names(self.config))
            await self._share_adapters()
        except ApiError as error:
            refusal = Refusal.from_error(error)
        except Exception:
            logger.exception("a change of the LoRA adapters failed")
            refusal = Refusal.from_error(ApiError("The adapters could not be changed because of an internal error."))
        held.clear()
        channel.send(AdaptersChanged(message.number, refusal))  # dropped if that process has ended

    async def _share_adapters(self) -> None:
        """Return when every running frontend serves the current adapters; others get them at their start."""
        number = next(self._numbers)
        self.adapter_list = AdapterList(number, listing(self.adapters))
        complete = self._expect_answers(number)
        self.broadcast(self.adapter_list)
        await complete.wait()
        del self._collections[number]

    # ---- shutdown

    def refuse(self) -> None:
        """Refuse requests as `Frontend.refuse`; frontends are no longer restarted."""
        self.ending = True
        self.broadcast(Drain())

    async def drain(self) -> None:
        """Drain as `Frontend.drain`."""
        await self._until_drained(self.config.server.shutdown_timeout + END_TIMEOUT + 1)

    async def fail(self, reason: str) -> None:
        """Fail every request as `Frontend.fail`."""
        self.ending = True
        self.broadcast(Fail(reason))
        await self._until_drained(END_TIMEOUT + 1)

    async def _until_drained(self, timeout: float) -> None:
        waiting = [
            asyncio.create_task(frontend.drained.wait()) for frontend in self.frontends if frontend.channel is not None
        ]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout)
            if late:
                logger.warning("drain: %d frontends did not finish in time", len(late))
            for task in late:
                task.cancel()
        if self._pool is not None:
            await self._pool.close()

    async def end(self) -> None:
        """End every frontend process."""
        self.ending = True
        self.broadcast(End())
        _, late = await asyncio.wait(self._running, timeout=EXIT_TIMEOUT)
        self.kill()
        await asyncio.gather(*late, return_exceptions=True)
        self.adapters.close()

    def kill(self) -> None:
        for frontend in self.frontends:
            frontend.kill()


def share(listener: socket.socket, count: int) -> list[socket.socket]:
    """Return `count` listeners on the port of `listener`, itself included; the kernel spreads connections over them.
    The parent keeps them open, so that connections to a dead frontend wait for its successor. Raises OSError.

    A Unix socket cannot be bound several times, and only Linux distributes connections: elsewhere all frontends accept
    from the one socket.
    """
    if listener.family == socket.AF_UNIX or sys.platform != "linux":
        return [listener] * count
    # set after the first bind, which must fail if another server has the port
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listeners = [listener]
    for _ in range(count - 1):
        another = socket.socket(listener.family, listener.type, listener.proto)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            another.bind(listener.getsockname())
        except OSError:  # the socket is another user's, systemd's
            another.close()
            return [listener] * count
        another.listen(BACKLOG)
        another.setblocking(False)
        listeners.append(another)
    return listeners
