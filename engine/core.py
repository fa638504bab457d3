"""The engine process: receive, schedule, execute, update, send.

Started as `python -m quire.engine.core ADDRESS [INDEX]`. The parent writes its `Config` to stdin (4 bytes of length,
big-endian, then msgpack) and keeps stdin open. EOF means that the parent died: the engine kills itself. Any later byte
asks the engine to shut down, with exit code 0. The engine ignores SIGINT and SIGTERM and leaves them to the parent,
which may have requests to finish when a whole process group is signalled. A failure of the engine is logged once, sent
to every server as `EngineDead`, and ends the process with exit code 1.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from quire.configs import platforms
from quire.configs.config import Config
from quire.configs.priority import run_nice
from quire.engine.calls import Calls
from quire.engine.chores.base import Chore, run_due, seconds_until_due
from quire.engine.chores.jobs import Jobs
from quire.engine.chores.open import open_chores
from quire.engine.chores.stats import SendStats
from quire.engine.executor.base import Executor, Pending, get_executor, import_executor, steps_in_flight
from quire.engine.executor.stubs import answer
from quire.engine.ipc import ServerSocket
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CalledTools,
    CallResult,
    EngineCalls,
    EngineDead,
    EngineOutput,
    FromEngine,
    Hello,
    Progress,
    Ready,
    StepOutputs,
    ToEngine,
)
from quire.engine.process import (
    EXIT_SIGNAL,
    dump_stacks_on,
    end_with_parent,
    exit_on,
    flush_stderr,
    kill_descendants,
    kill_engine,
    no_collection,
    read_config,
    request_exit,
    start_logging,
    wake_on_signals,
    watch_hang_up,
    watch_parent,
)
from quire.engine.scheduler import Outputs, Step
from quire.engine.startup import make_scheduler, warm_up

logger = logging.getLogger(__name__)

FETCH_POLL_INTERVAL = 0.001  # seconds between looks for fetched blocks when there is no other work
CONNECT_TIMEOUT = 1.0  # seconds that a failing engine waits for a server to connect


class EngineCore:
    """The loop of one engine: call `start`, then `run`. Both raise the errors that end the engine."""

    def __init__(self, config: Config, socket: ServerSocket, index: int = 0):
        config = replace(config, cache=config.cache.for_engine(index, config.parallel.world_size))
        self.config, self.index = config, index  # `index` among `data_parallel_size` engines
        self.socket = socket
        self.clients: set[bytes] = set()  # ROUTER identities of servers that sent Hello
        self.progress = Progress("starting", 0.0)
        self.ready: Ready | None = None
        self.early_messages: list[tuple[bytes, ToEngine]] = []  # messages that arrived before the engine was ready
        self.executor: Executor | None = None
        self.in_flight: deque[tuple[Step, Pending]] = deque()
        self.jobs, self.stats = Jobs(), SendStats(self.send_stats)
        self.chores: list[Chore] = [self.jobs, self.stats]

    # ---- the loop

    def run(self) -> None:
        while True:
            self.receive()
            self.step()

    def receive(self) -> None:
        """Handle all received messages and do the chores that are due. With no request, sleep until there is one.

        Raises RuntimeError if a worker process died while the engine slept.
        """
        if not self.in_flight and not self.scheduler.requests:
            run_due([self.stats], self.is_idle)  # for the last step, before a sleep
            if self.socket.wait(seconds_until_due(self.chores, self.is_idle)):
                raise RuntimeError("a worker process died")
        for client, message in self.socket.receive():
            self.handle(client, message)
        run_due(self.chores, self.is_idle)

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.scheduler.requests and not self.jobs

    def step(self) -> None:
        """Schedule one step; when `depth` steps are in flight, wait for the oldest and process its results."""
        if len(self.in_flight) < self.depth and (step := self.scheduler.schedule()):
            self.in_flight.append((step, self.executor.execute(step.input)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            step, pending = self.in_flight.popleft()
            output = pending.result()
            for chore in self.chores:
                chore.observe(step)
            self.send(self.scheduler.update(step, output))
        elif self.scheduler.requests:
            assert self.jobs or self.scheduler.is_fetching, "there are requests, but none can run"
            time.sleep(FETCH_POLL_INTERVAL)

    def handle(self, client: bytes, message: ToEngine) -> None:
        match message:
            case Hello():
                self.clients.add(client)
                self.post(client, self.ready or self.progress)
            case _ if self.ready is None:
                self.early_messages.append((client, message))
            case AddRequest():
                self.add(client, message)
            case AbortRequests():
                self.scheduler.abort(message.request_ids, client)
                self.stats.schedule()
            case CalledTools():
                self.scheduler.kv.retention.called_tools(client, message.request_ids)
            case Call():
                self.call(client, message)

    def add(self, client: bytes, message: AddRequest) -> None:
        try:
            outputs = self.scheduler.add(message, client)
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("request %s: cannot add it to the queue", message.request_id)
            kind = "invalid_request" if isinstance(error, ValueError) else "engine"
            outputs = [
                EngineOutput(choice.request_id, [], "error", error=str(error), error_kind=kind)
                for choice in message.choices
            ]
        self.send({client: outputs} if outputs else {})

    def call(self, client: bytes, message: Call) -> None:
        """Answer a utility call, at once or when its job ends. Its error does not affect the engine."""
        reply = functools.partial(self.reply, client, message.call_id)
        try:
            value = answer(EngineCalls, self.calls, message.method, message.args)
        except Exception as error:
            reply(None, error)
            return
        if isinstance(value, Generator):
            self.jobs.add(value, reply)
        else:
            reply(value, None)

    def reply(self, client: bytes, call_id: int, value: Any, error: Exception | None) -> None:
        """Send the result of a call."""
        if error is not None:
            logger.error("call %d failed", call_id, exc_info=error)
        self.post(client, CallResult(call_id, value, error and f"{type(error).__name__}: {error}"))

    # ---- sending messages

    def send(self, outputs: Outputs) -> None:
        """Send each server its outputs, and schedule statistics."""
        self.stats.schedule()
        for client, client_outputs in outputs.items():
            self.post(client, StepOutputs(client_outputs))

    def send_stats(self) -> None:
        """Send statistics since the last message to every server."""
        self.broadcast(StepOutputs([], self.scheduler.flush_stats()))

    def post(self, client: bytes, message: FromEngine) -> None:
        """Send a message to one server. If the server disconnected, abort its requests."""
        if not self.socket.send(client, message):
            self.clients.discard(client)
            if self.ready:
                self.abort_client(client)

    def abort_client(self, client: bytes) -> None:
        """Abort the requests of a disconnected server. A server without requests shut down normally."""
        if num_requests := sum(owner == client for owner, _ in self.scheduler.requests):
            logger.warning("server %s disconnected: aborting its %d requests", client.hex(), num_requests)
            self.scheduler.abort_client(client)

    def broadcast(self, message: FromEngine) -> None:
        for client in list(self.clients):
            self.post(client, message)

    # ---- start and shutdown

    def start(self) -> None:
        """Load the model, run a warm-up request, and send `Ready` to the servers.

        Raises ValueError for errors that the user can correct.
        """
        with no_collection():
            self.executor = get_executor(self.config)
        ready = self.executor.initialize(self.report_progress)
        for fd in self.executor.sentinels():
            self.socket.watch(fd)
        self.depth = steps_in_flight(self.config, ready)
        self.scheduler = make_scheduler(self.config, ready, self.executor)
        self.calls = Calls(self.scheduler, self.executor.workers, self.send)
        self.report_progress("warming up", 0.0)
        warming_up = functools.partial(self.report_progress, "warming up")
        warm_up(self.scheduler, self.executor, ready.compiles_at_use, warming_up)
        if ready.has_slot_files:
            self.scheduler.contents.open_slots(self.executor.slots, self.index)
        workers, report = self.executor.workers, self.stats.schedule
        self.chores += open_chores(self.config, ready, self.scheduler, workers, self.index, report)
        self.calls.chores = self.chores
        gc.collect()
        # exclude the objects loaded so far from later garbage collections: they live as long as the process
        gc.freeze()
        self.ready = Ready(ready, self.depth)
        self.broadcast(self.ready)
        for client, message in self.early_messages:
            self.handle(client, message)
        self.early_messages.clear()

    def stop(self) -> None:
        """Finish the chores before an orderly exit."""
        for chore in self.chores:
            chore.stop()

    def report_progress(self, phase: str, fraction: float) -> None:
        """Send loading progress to the servers, and answer those that connect meanwhile."""
        last, self.progress = self.progress, Progress(phase, fraction)
        for client, message in self.socket.receive():
            self.handle(client, message)
        if phase != last.phase or fraction - last.fraction >= 0.01 or fraction >= 1:
            self.broadcast(self.progress)
        else:
            self.progress = last  # too small a change to report

    def die(self, error: Exception) -> None:
        """Log a fatal error and send its reason to the servers."""
        # the user can correct it: a traceback does not help
        correctable = self.ready is None and isinstance(error, ValueError)
        reason = str(error) if correctable else f"{type(error).__name__}: {error}"
        if not correctable:
            logger.critical("the engine failed", exc_info=error)
        if not self.clients:
            self.socket.wait(CONNECT_TIMEOUT)  # the server may not have connected yet, and must learn the reason
        self.clients.update(client for client, message in self.socket.receive() if isinstance(message, Hello))
        if correctable and not self.clients:  # otherwise the servers log it
            logger.error("cannot start: %s", reason)
        self.broadcast(EngineDead(reason))


def main() -> None:
    """Run the engine process. Does not return."""
    # Ctrl-C reaches the whole process group; the parent decides when to shut down
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_on(EXIT_SIGNAL)
    end_with_parent()
    dump_stacks_on(signal.SIGUSR2, "engine")
    platforms.name_process("quire-engine")
    socket = ServerSocket(sys.argv[1])
    socket.watch(wake_on_signals())
    if len(sys.argv) > 3:  # started before its configuration is known
        watch_hang_up(sys.stdin.fileno(), functools.partial(kill_engine, socket.unlink))
        with no_collection(), contextlib.suppress(Exception):  # `start` raises it again
            run_nice(int(sys.argv[4]), lambda report: import_executor(sys.argv[3]), lambda phase, fraction: None)
    try:
        config = read_config(sys.stdin.fileno())
    except EOFError:  # the server has ended, or needs no engine
        kill_engine(socket.unlink)
    start_logging(config.server, "engine")
    core = EngineCore(config, socket, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    watch_parent(sys.stdin.fileno(), request_exit, functools.partial(kill_engine, socket.unlink))
    exit_code = 1
    try:
        core.start()
        core.run()
    except SystemExit:
        exit_code = 0
    except Exception as error:
        core.die(error)
        if core.executor:
            # not `shutdown`, which waits: a rank may wait for a dead rank, a thread for a failed device
            core.executor.kill()
        kill_descendants()
    finally:
        signal.signal(EXIT_SIGNAL, signal.SIG_IGN)
        socket.close()
        if core.executor and exit_code == 0:
            core.stop()
            core.executor.shutdown()
        flush_stderr()
        os._exit(exit_code)  # everything is cleaned up, and tearing down an interpreter with torch is slow


if __name__ == "__main__":
    main()
