"""The engine process: receive -> schedule -> execute -> update -> send.

Started as `python -m quire.engine.core ADDRESS`. On stdin the parent writes its `Config` (4 bytes of length,
big-endian, then msgpack) and keeps stdin open: its end means that the parent is gone, and the engine with it; anything
written there later ends the engine in order, with code 0. SIGINT and SIGTERM are left to the parent, which may have
requests to finish when a whole process group is signalled. A failure of the engine itself is logged once, told to every
server as `EngineDead`, and ends the process with code 1.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec

from quire.configs.config import Config
from quire.engine.executor.base import Executor, Pending, get_executor, steps_in_flight
from quire.engine.ipc import ServerSocket
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineDead,
    EngineOutput,
    FromEngine,
    Hello,
    Progress,
    Ready,
    SamplingParams,
    StepOutputs,
    ToEngine,
)
from quire.engine.process import (
    dump_stacks_on,
    end_with_parent,
    kill_descendants,
    remove_files,
    set_name,
    start_logging,
    wake_on_signals,
    watch_parent,
)
from quire.engine.scheduler import Outputs, Scheduler, Step

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25  # seconds between statistics while busy
END_SIGNAL = signal.SIGUSR1  # to the main thread, from the one that watches stdin
LOOK_INTERVAL = 0.5  # seconds between looks of an idle engine for what its workers wait for
GRACE = 1.0  # seconds that a dying engine waits for a server to tell


class EngineCore:
    """The loop of one engine. `start`, then `run`; both raise what the engine cannot survive."""

    def __init__(self, config: Config, socket: ServerSocket):
        self.config = config
        self.socket = socket
        self.clients: set[bytes] = set()  # servers that said Hello
        self.progress = Progress("starting", 0.0)
        self.ready: Ready | None = None
        self.early: list[tuple[bytes, ToEngine]] = []  # what arrived before we were ready
        self.executor: Executor | None = None
        self.in_flight: deque[tuple[Step, Pending]] = deque()
        self.works_idle = False  # whether the workers have put something off until there is nothing to run
        self.stats_due = 0.0  # time.monotonic() of the next statistics; 0 when there is nothing new to tell
        self.awaits_ops = False  # whether the workers' kernels are still being compiled

    # ---- the loop

    def run(self) -> None:
        while True:
            self.receive()
            self.step()

    def step(self) -> None:
        """Keep `depth` steps in flight; once they are, wait for the oldest."""
        if len(self.in_flight) < self.depth and (step := self.scheduler.schedule()):
            self.in_flight.append((step, self.executor.execute(step.input)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            step, future = self.in_flight.popleft()
            self.send(self.scheduler.update(step, future.result()))
        else:
            assert not self.scheduler.requests, "there are requests, but none can run"
            self.works_idle = self.works_idle and self.executor.call("work_idle")

    def receive(self) -> None:
        """Handle what has arrived. With nothing to run, sleep until something does, but for looks at whether the workers' kernels have become ready, lest a request pay for that."""
        idle = not self.in_flight and not self.scheduler.requests
        if idle:
            self.send_stats()
            if self.socket.wait(0 if self.works_idle else LOOK_INTERVAL if self.awaits_ops else None):
                raise RuntimeError("a worker process died")
        messages = self.socket.receive()
        for client, message in messages:
            self.handle(client, message)
        if idle and not messages and self.awaits_ops:
            self.awaits_ops = self.executor.call("look_for_ops")

    def handle(self, client: bytes, message: ToEngine) -> None:
        match message:
            case Hello():
                self.clients.add(client)
                self.post(client, self.ready or self.progress)
            case _ if self.ready is None:
                self.early.append((client, message))
            case AddRequest():
                self.add(client, message)
            case AbortRequests():
                self.scheduler.abort(message.request_ids, client)
                self.note_stats()
            case Call():
                self.post(client, self.call(message))

    def add(self, client: bytes, message: AddRequest) -> None:
        try:
            outputs = self.scheduler.add(message, client)
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("request %s cannot be added", message.request_id)
            kind = "invalid_request" if isinstance(error, ValueError) else "engine"
            outputs = [
                EngineOutput(choice.request_id, [], "error", error=str(error), error_kind=kind)
                for choice in message.choices
            ]
        if outputs:
            self.post(client, StepOutputs(outputs))
        self.note_stats()

    def call(self, message: Call) -> CallResult:
        """Run a utility method. Its failure is the caller's alone."""
        methods = {
            "reset_prefix_cache": self.scheduler.kv.reset_prefix_cache,
            "stats": lambda: msgspec.structs.asdict(self.scheduler.stats()),
        }
        if message.method not in methods:
            return CallResult(
                message.call_id, error=f"unknown method {message.method!r}; there are {', '.join(methods)}"
            )
        try:
            return CallResult(message.call_id, methods[message.method](*message.args))
        except Exception as error:
            logger.exception("call of %s failed", message.method)
            return CallResult(message.call_id, error=f"{type(error).__name__}: {error}")

    # ---- messages out

    def send(self, outputs: Outputs) -> None:
        """One message per server, with statistics when they are due."""
        self.note_stats()
        if time.monotonic() >= self.stats_due:
            self.send_stats(outputs)
        else:
            for client, client_outputs in outputs.items():
                self.post(client, StepOutputs(client_outputs))

    def note_stats(self) -> None:
        """There is something new to tell."""
        self.stats_due = self.stats_due or time.monotonic() + STATS_INTERVAL

    def send_stats(self, outputs: Outputs | None = None) -> None:
        """Tell every server what changed since the last time, together with its `outputs`."""
        if not self.stats_due:
            return
        self.stats_due, stats, outputs = 0.0, self.scheduler.take_stats(), outputs or {}
        for client in self.clients | outputs.keys():
            self.post(client, StepOutputs(outputs.get(client, []), stats))

    def post(self, client: bytes, message: FromEngine) -> None:
        """Send to one server; if it is gone, so are its requests."""
        if not self.socket.send(client, message):
            self.clients.discard(client)
            if self.ready:
                self.abort_client(client)

    def abort_client(self, client: bytes) -> None:
        """That server is gone. One without requests has ended as it should."""
        if any(owner == client for owner, _ in self.scheduler.requests):
            logger.warning("a server has gone away; its requests are aborted")
            self.scheduler.abort_client(client)

    def broadcast(self, message: FromEngine) -> None:
        for client in list(self.clients):
            self.post(client, message)

    # ---- start and end

    def start(self) -> None:
        """Load, run a first request through everything, and tell the servers that we are ready.

        Raises ValueError for what the user can correct.
        """
        self.executor = get_executor(self.config)
        ready = self.executor.initialize(self.report_progress)
        for fd in self.executor.sentinels():
            self.socket.watch(fd)
        self.depth, self.works_idle = steps_in_flight(self.config, ready), ready.works_idle
        kv = KVCacheManager(
            ready.num_blocks,
            ready.block_size,
            self.config.cache.enable_prefix_caching,
            ready.groups,
            ready.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(self.config.scheduler, ready, kv, self.config.parallel.pipeline_parallel_size)
        self.report_progress("warming up", 0.0)
        self.warm_up()
        self.awaits_ops = self.executor.call("look_for_ops")
        gc.collect()
        gc.freeze()  # what is loaded now stays: leave it out of every later collection
        self.ready = Ready(ready, self.depth)
        self.broadcast(self.ready)
        for client, message in self.early:
            self.handle(client, message)
        self.early.clear()

    def report_progress(self, phase: str, fraction: float) -> None:
        """Called while loading: tell it to the servers, and answer those that connect meanwhile."""
        last, self.progress = self.progress, Progress(phase, fraction)
        for client, message in self.socket.receive():
            self.handle(client, message)
        if phase != last.phase or fraction - last.fraction >= 0.01 or fraction >= 1:
            self.broadcast(self.progress)
        else:
            self.progress = last  # too small a change to tell

    def warm_up(self) -> None:
        """One request of a few tokens, prompt and decode, through scheduler and workers.

        Raises RuntimeError if it fails. Leaves nothing behind.
        """
        prompt = [0] * min(4, max(self.scheduler.max_model_len - 2, 1))
        sampling = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True)
        self.scheduler.add(AddRequest("warm-up", prompt, sampling))
        while step := self.scheduler.schedule():
            for output in self.scheduler.update(step, self.executor.execute(step.input).result()).get(b"", []):
                if output.error:
                    raise RuntimeError(f"the first step failed: {output.error}")
        self.scheduler.kv.reset_prefix_cache()
        self.scheduler.take_stats()

    def die(self, error: Exception) -> None:
        """The engine cannot go on: tell the servers why, and the log what they cannot know."""
        correctable = self.ready is None and isinstance(error, ValueError)  # by the user: our stack does not help
        reason = str(error) if correctable else f"{type(error).__name__}: {error}"
        if not correctable:
            logger.critical("the engine failed", exc_info=error)
        if not self.clients:
            self.socket.wait(GRACE)  # a failure at once, before the server has connected: it wants to know why
        self.clients.update(client for client, message in self.socket.receive() if isinstance(message, Hello))
        if correctable and not self.clients:  # otherwise they say it
            logger.error("cannot start: %s", reason)
        self.broadcast(EngineDead(reason))

    def kill(self) -> None:
        """End this process, and all that it started, at once, from any thread: the parent is gone, and cannot tidy up
        either.
        """
        kill_descendants()
        remove_files()
        self.socket.unlink()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def read_config(fd: int) -> Config:
    """Read the length-prefixed configuration from `fd`. Raises EOFError if it ends early."""

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := os.read(fd, count - len(data))):
                raise EOFError("stdin ended before the configuration")
            data += part
        return data

    return msgspec.msgpack.decode(read(int.from_bytes(read(4), "big")), type=Config)


def _end(*_: Any) -> None:
    sys.exit(0)


def _ask_to_end() -> None:
    """From another thread: the signal also interrupts a sleep or a poll of the main one."""
    signal.pthread_kill(threading.main_thread().ident, END_SIGNAL)


def _flush_stderr() -> None:
    # a full disk, or a reader that is gone, must not keep us from ending
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def main() -> None:
    """Run the engine process. Does not return."""
    # Ctrl-C reaches the whole process group; the parent decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END_SIGNAL, _end)
    end_with_parent()
    dump_stacks_on(signal.SIGUSR2, "engine")
    set_name("quire-engine")
    socket = ServerSocket(sys.argv[1])
    socket.watch(wake_on_signals())
    config = read_config(sys.stdin.fileno())
    start_logging(config.server.log_level, "engine")
    core = EngineCore(config, socket)
    watch_parent(sys.stdin.fileno(), _ask_to_end, core.kill)
    exit_code = 1
    try:
        core.start()
        core.run()
    except SystemExit:
        exit_code = 0
    except Exception as error:
        core.die(error)
        if core.executor:
            # not `shutdown`, which waits: a rank may wait for one that is dead, a thread for a device that is
            core.executor.kill()
        kill_descendants()
    finally:
        signal.signal(END_SIGNAL, signal.SIG_IGN)
        socket.close()
        if core.executor and exit_code == 0:
            core.executor.shutdown()
        _flush_stderr()
        os._exit(exit_code)  # nothing is left to tidy up, and an interpreter with torch takes long to take down


if __name__ == "__main__":
    main()
