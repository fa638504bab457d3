"""Several frontend processes on one port (`--api-server-count`), seen from their parent, which has the engines: starts
them, tells them what concerns all, starts another one in the place of one that died, and adds up what they count.
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
from collections.abc import Callable

import msgspec

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Progress, Ready
from quire.server.engines.client import EngineClient
from quire.server.engines.pool import EnginePool
from quire.server.engines.process import python_environment
from quire.server.engines.supervisor import DEATH_WINDOW, MAX_DEATHS, START_RETRY, describe_exit, in_thread
from quire.server.frontends.channel import Channel
from quire.server.frontends.frontend import END_TIMEOUT
from quire.server.frontends.messages import (
    Busy,
    CannotStart,
    Collect,
    Drain,
    Drained,
    Elsewhere,
    End,
    Engine,
    EngineGone,
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
    TrialDeath,
)
from quire.server.metrics.metrics import Counts, Metrics
from quire.server.metrics.pool import MetricsPool, make_metrics
from quire.server.startup.descriptors import BACKLOG

logger = logging.getLogger("quire")

COLLECT_TIMEOUT = 2.0  # seconds for a frontend to say what it counted; after that, what it said last counts
PING_INTERVAL = 1.0  # seconds
STALL_TIMEOUT = 10.0  # seconds without an answer, after which a frontend is killed, and another one takes its place
MAX_QUEUED = 64 << 20  # bytes that a frontend has not taken: it is stalled, too
EXIT_TIMEOUT = 5.0  # seconds for a frontend that was told to end


class FrontendFailed(ValueError):
    """A frontend cannot be started, or not be kept alive."""


class FrontendProcess:
    """The place of one frontend, and the process that has it at present."""

    def __init__(self, index: int, listener: socket.socket, num_engines: int):
        self.index, self.listener, self.num_engines = index, listener, num_engines
        self.process: subprocess.Popen | None = None
        self.channel: Channel | None = None
        self.deaths: list[float] = []
        self.loaded, self.opened, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reset()

    def reset(self) -> None:
        """Nothing is known of the process yet."""
        self.num_open = [0] * self.num_engines
        self.num_in_flight = 0
        self.counts: list[Counts] = []  # by engine; as last told
        self.is_watched = False  # once it has loaded everything, its event loop has no reason to stand still
        self.silence = 0.0  # seconds since it answered a `Ping`
        self.stalled: str | None = None  # why it is being killed

    async def start(self, config: Config) -> None:
        """In a process group of its own, so that Ctrl-C reaches only us.

        Raises OSError where the system has no descriptors, memory or processes left.
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
                self.kill_stalled(f"it stalled: {self.channel.num_queued} bytes wait for it")

    def ping(self) -> None:
        """Every PING_INTERVAL seconds.

        They are counted so, and not by a clock: time in which we could not listen does not count.
        """
        if self.is_watched and self.stalled is None:
            if self.silence >= STALL_TIMEOUT:
                self.kill_stalled(f"it stalled: no answer for {self.silence:.0f} seconds")
            self.silence += PING_INTERVAL
            self.send(Ping())

    def kill_stalled(self, reason: str) -> None:
        """Also one that is stopped."""
        self.stalled = reason
        self.kill()

    async def wait(self) -> int:
        """Its exit code, once it has ended; nothing can be sent to it afterwards."""
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
        self.members = [FrontendProcess(index, one, num_engines) for index, one in enumerate(share(listener, count))]
        self.addresses: list[str | None] = [None] * num_engines  # of the living engines
        self.phase: Phase | None = None
        self.load: Load | None = None
        self.metrics: Metrics | MetricsPool | None = None  # of the engines, and of frontends that are no more
        self.ending = False
        self._pool: EnginePool | None = None  # our connections to the engines: they receive status only
        self._trials_noted = [False] * num_engines  # whether a frontend reported its last death as one on trial
        self._ready: Ready | None = None  # what they said when all were up for the first time
        self._refusals: asyncio.Queue[str] = asyncio.Queue()  # what frontends say cannot be started
        self._collections: dict[int, tuple[set[int], asyncio.Event]] = {}  # members that have not answered yet
        self._numbers = itertools.count(1)
        self._answering: set[asyncio.Task] = set()
        self._keeping: list[asyncio.Task] = []

    @property
    def num_in_flight(self) -> int:
        """HTTP requests being answered by all frontends, as they last told: up to a tenth of a second ago."""
        return sum(member.num_in_flight for member in self.members)

    def tell(self, message: msgspec.Struct) -> None:
        """Every frontend that lives."""
        for member in self.members:
            member.send(message)

    # ---- the processes

    async def serve(self) -> None:
        """Until `end`. Raises FrontendFailed; the other frontends live on then."""
        self._keeping = [asyncio.create_task(self._keep(member)) for member in self.members]
        refused, pinging = asyncio.create_task(self._refusals.get()), asyncio.create_task(self._ping())
        try:
            done, _ = await asyncio.wait({refused, *self._keeping}, return_when=asyncio.FIRST_COMPLETED)
            if refused in done:
                raise FrontendFailed(refused.result())
            await asyncio.gather(*self._keeping)
        finally:
            refused.cancel()
            pinging.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL)
            for member in self.members:
                member.ping()

    async def _keep(self, member: FrontendProcess) -> None:
        """Process after process in one place."""
        while not self.ending:
            try:
                await member.start(self.config)
            except OSError as error:
                self._judge(member, f"not started: {error.strerror}")
                await asyncio.sleep(START_RETRY)
                continue
            self._brief(member)
            await self._listen(member)
            code = await member.wait()
            reason = member.stalled or describe_exit(code)
            self._bury(member)
            if not self.ending:
                self._judge(member, reason)
        member.drained.set()

    def _brief(self, member: FrontendProcess) -> None:
        """What a new frontend has missed."""
        for message in (
            self.phase,
            self.load,
            *(Engine(index, address) for index, address in enumerate(self.addresses) if address is not None),
        ):
            if message is not None:
                member.send(message)
        if self.ending:
            member.send(Drain())
        self._tell_elsewhere()

    def _bury(self, member: FrontendProcess) -> None:
        """Its requests are gone, but were counted."""
        if self.metrics is not None:
            for engine, counts in enumerate(member.counts):
                self.metrics.of(engine).add(counts)
        member.reset()
        self._note_load()
        for number in list(self._collections):
            self._note_answer(number, member)
        self._tell_elsewhere()

    def _judge(self, member: FrontendProcess, reason: str) -> None:
        """Raises FrontendFailed when another one would not help."""
        now = time.monotonic()
        member.deaths = [death for death in member.deaths if now - death < DEATH_WINDOW] + [now]
        if len(member.deaths) >= MAX_DEATHS:
            raise FrontendFailed(
                f"frontend {member.index} died {len(member.deaths)} times within {DEATH_WINDOW:.0f} seconds, at "
                f"last by {reason}"
            )
        logger.error("frontend %d died (%s); its connections are lost, and a new one starts", member.index, reason)

    async def _listen(self, member: FrontendProcess) -> None:
        while (message := await member.channel.receive()) is not None:
            match message:
                case Loaded():
                    member.loaded.set()
                    member.is_watched = True
                case Pong():
                    member.silence = 0.0
                case CannotStart():
                    self._refusals.put_nowait(message.reason)
                case Opened():
                    self._note_opened(member)
                case Busy():
                    member.num_open, member.num_in_flight = message.num_open, message.num_in_flight
                    self._note_load()
                    self._tell_elsewhere()
                case TrialDeath():
                    self._note_trial_death(message.index)
                case Snapshot():
                    member.counts = message.counts
                    self._note_answer(message.number, member)
                case Scrape():
                    task = asyncio.create_task(self._answer_scrape(member, message.number))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                case Drained():
                    member.drained.set()

    def _tell_elsewhere(self) -> None:
        for member in self.members:
            others = [other for other in self.members if other is not member]
            member.send(
                Elsewhere(
                    [sum(counts) for counts in zip(*(other.num_open for other in others))],
                    sum(other.num_in_flight for other in others),
                )
            )

    # ---- start

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Until every frontend has."""
        self.load = Load(model_folder, tokenizer_folder)
        self.tell(self.load)
        for member in self.members:
            await member.loaded.wait()

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """As `Frontend.connect`. The frontends, which have the requests, are told of each new engine and each death."""
        clients = [
            EngineClient(
                functools.partial(on_stats, engine),
                functools.partial(on_progress, engine),
                engine,
                on_connect=functools.partial(self._announce_engine, engine),
                on_death=functools.partial(self._announce_death, engine),
            )
            for engine in range(len(self.addresses))
        ]
        self._pool = EnginePool(clients)
        return clients

    def _announce_engine(self, engine: int, address: str) -> None:
        self.addresses[engine] = address
        self.tell(Engine(engine, address))

    def _announce_death(self, engine: int, reason: str) -> None:
        self._trials_noted[engine] = False
        self.addresses[engine] = None
        self.tell(EngineGone(engine, reason))

    def _note_trial_death(self, engine: int) -> None:
        """One death of an engine, however many frontends had requests on trial in it."""
        self._pool.clients[engine].num_trial_deaths += not self._trials_noted[engine]
        self._trials_noted[engine] = True

    def _note_load(self) -> None:
        """All requests at an engine are those of the frontends."""
        for client in self._pool.clients if self._pool is not None else ():
            client.num_elsewhere = sum(member.num_open[client.index] for member in self.members)

    def progress(self, phase: str, fraction: float) -> None:
        if self.phase is None or phase != self.phase.phase or fraction - self.phase.fraction >= 0.01:
            self.phase = Phase(phase, fraction)
            self.tell(self.phase)

    def open(self) -> None:
        """Called when an engine is up. The frontends see for themselves."""
        if self._ready is None and self._pool.ready is not None:
            self._ready = self._pool.ready
            self.metrics = make_metrics(
                self.config, (self.config.server.served_model_name or [self.config.model.model])[0], self._ready.worker
            )
            self._announce_when_open()

    def _note_opened(self, member: FrontendProcess) -> None:
        first = not member.opened.is_set()
        member.opened.set()
        if first:
            self._announce_when_open()

    def _announce_when_open(self) -> None:
        if self._ready is not None and all(member.opened.is_set() for member in self.members):
            self.on_open(self._ready)

    # ---- life

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """As `Frontend.observe_stats`."""
        if self.metrics is not None:
            self.metrics.of(engine).observe_stats(stats)

    def on_death(self, engine: int) -> None:
        """Nothing to do: the frontends were told through the engine's observer."""

    async def _answer_scrape(self, member: FrontendProcess, number: int) -> None:
        member.send(Page(number, await self.render_metrics()))

    async def render_metrics(self) -> bytes:
        """What the engines say, and the counts of all frontends, past and present, added up."""
        await self._collect()
        if self.metrics is None:
            return b""
        pages = [
            self.metrics.of(engine).plus(member.counts[engine] for member in self.members if member.counts)
            for engine in range(len(self.addresses))
        ]
        return MetricsPool(pages).render()

    async def _collect(self) -> None:
        """Have every frontend tell its counts; from one that does not answer in time, we have older ones."""
        number = next(self._numbers)
        asked = {member.index for member in self.members if member.channel is not None}
        self._collections[number] = (asked, complete := asyncio.Event())
        self.tell(Collect(number))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), COLLECT_TIMEOUT)
        del self._collections[number]

    def _note_answer(self, number: int, member: FrontendProcess) -> None:
        if number in self._collections:
            asked, complete = self._collections[number]
            asked.discard(member.index)
            if not asked:
                complete.set()

    # ---- end

    def refuse(self) -> None:
        """As `Frontend.refuse`; no frontend is started any more."""
        self.ending = True
        self.tell(Drain())

    async def drain(self) -> None:
        """As `Frontend.drain`."""
        await self._until_drained(self.config.server.shutdown_timeout + END_TIMEOUT + 1)

    async def fail(self, reason: str) -> None:
        """As `Frontend.fail`."""
        self.ending = True
        self.tell(Fail(reason))
        await self._until_drained(END_TIMEOUT + 1)

    async def _until_drained(self, timeout: float) -> None:
        waiting = [asyncio.create_task(member.drained.wait()) for member in self.members if member.channel is not None]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout)
            if late:
                logger.warning("%d frontends did not end their requests in time", len(late))
            for task in late:
                task.cancel()
        if self._pool is not None:
            await self._pool.close()

    async def end(self) -> None:
        """End every frontend process."""
        self.ending = True
        self.tell(End())
        _, late = await asyncio.wait(self._keeping, timeout=EXIT_TIMEOUT)
        self.kill()
        await asyncio.gather(*late, return_exceptions=True)

    def kill(self) -> None:
        for member in self.members:
            member.kill()


def share(listener: socket.socket, count: int) -> list[socket.socket]:
    """`listener` and more on the same port, `count` in all, among which the kernel spreads new connections. We keep
    them open: connections to a frontend that died wait for its successor. Raises OSError.

    A Unix socket cannot be bound several times, and only Linux spreads: elsewhere it is one socket, and whoever is
    quickest accepts.
    """
    if listener.family == socket.AF_UNIX or sys.platform != "linux":
        return [listener] * count
    # only now: another server's bind to our port, or ours to another's, has to fail
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listeners = [listener]
    for _ in range(count - 1):
        another = socket.socket(listener.family, listener.type, listener.proto)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        another.bind(listener.getsockname())
        another.listen(BACKLOG)
        another.setblocking(False)
        listeners.append(another)
    return listeners
