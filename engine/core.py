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
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import msgspec

from quire.configs.config import Config
from quire.configs.kv_events import read_kv_events
from quire.engine.calls import Calls
from quire.engine.chores.jobs import Jobs
from quire.engine.executor.base import Executor, Pending, get_executor, steps_in_flight
from quire.engine.executor.stubs import answer
from quire.engine.ipc import ServerSocket
from quire.engine.kv.events import KVEventLog
from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.publisher import KVEventPublisher
from quire.engine.kv.tiers import SAVED_AT_ONCE, Tiers, tiers_below
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
    PoolingParams,
    Progress,
    Ready,
    SamplingParams,
    StepOutputs,
    ToEngine,
    WorkerReady,
)
from quire.engine.process import (
    dump_stacks_on,
    end_with_parent,
    kill_descendants,
    no_collection,
    remove_files,
    set_name,
    start_logging,
    wake_on_signals,
    watch_parent,
)
from quire.engine.scheduler import Outputs, Scheduler, Step

logger = logging.getLogger(__name__)

SLOW_WARNING_INTERVAL = 60.0  # seconds
STATS_INTERVAL = 0.25  # seconds between statistics messages while busy
EXIT_SIGNAL = signal.SIGUSR1  # the thread that watches stdin sends it to the main thread
GIVE_BACK_INTERVAL = 5.0  # seconds between looks of an idle engine at the machine's memory
BUSY_GIVE_BACK_INTERVAL = 1.0  # the same while requests run
SAVE_INTERVAL, SAVE_RETRY = 1.0, 5.0  # seconds between writes of hot blocks to disk; after one that was not possible
SAVED_BYTES = 8 << 20  # that busy engines write at once
WRITTEN_AFTER = 1.0  # seconds until blocks that were given to the disk are written, unless it is slow
SAVE_TIMEOUT = 15.0  # seconds that an engine writes before it ends
FETCH_POLL_INTERVAL = 0.001  # seconds between looks for fetched blocks when nothing else is to do
LEFT_POOLS = 4  # KV events know the tokens of so many pools of blocks that left the pool
OPS_POLL_INTERVAL = 0.5  # seconds between polls of an idle engine for kernels that are being compiled
CONNECT_TIMEOUT = 1.0  # seconds that a failing engine waits for a server to connect


class EngineCore:
    """The loop of one engine: call `start`, then `run`. Both raise the errors that end the engine."""

    def __init__(self, config: Config, socket: ServerSocket, index: int = 0):
        self.config, self.index = config, index  # its number among `data_parallel_size` engines
        self.socket = socket
        self.clients: set[bytes] = set()  # ROUTER identities of servers that sent Hello
        self.progress = Progress("starting", 0.0)
        self.ready: Ready | None = None
        self.early_messages: list[tuple[bytes, ToEngine]] = []  # messages that arrived before the engine was ready
        self.executor: Executor | None = None
        self.jobs = Jobs()
        self.in_flight: deque[tuple[Step, Pending]] = deque()
        self.gives_back = False  # whether the workers can return the memory of an idle KV cache
        self.last_result = self.next_slow_warning = 0.0  # time.monotonic()
        self.works_idle = False  # whether the workers have work deferred until no request runs
        self.stats_due = 0.0  # time.monotonic() of the next statistics message; 0 if there are no new statistics
        self.give_back_due = 0.0  # time.monotonic() of a busy engine's next look at the machine's memory
        self.is_short = False  # whether the machine was short of memory at a busy engine's last look
        self.cache_used_at: float | None = None  # time.monotonic(); None while the KV cache's memory is given back
        self.save_due = 0.0  # time.monotonic() of the next write of hot blocks to disk
        self.written_due = 0.0  # time.monotonic() when what was given to the disk is told in statistics; 0: not
        self.saved_blocks = 1  # number of blocks that a busy engine writes at once
        self.publisher: KVEventPublisher | None = None
        self.awaits_ops = False  # whether the workers' kernels are still being compiled

    # ---- the loop

    def run(self) -> None:
        while True:
            self.receive()
            self.step()

    def step(self) -> None:
        """Schedule one step; when `depth` steps are in flight, wait for the oldest and process its results."""
        if self.jobs:
            self.jobs.run(time.monotonic(), idle=False)
        if len(self.in_flight) < self.depth and (step := self.scheduler.schedule()):
            self.in_flight.append((step, self.executor.execute(step.input)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            step, future = self.in_flight.popleft()
            result = future.result()
            if step.input.encode and self.config.server.otlp_traces_endpoint:
                step.note_encoded(*self.executor.workers.encoded())
            self.note_slow(step)
            self.send(self.scheduler.update(step, result))
        else:
            if self.jobs or (self.scheduler.tiers is not None and self.scheduler.tiers.busy):
                time.sleep(FETCH_POLL_INTERVAL)
                return
            assert not self.scheduler.requests, "there are requests, but none can run"
            self.works_idle = self.works_idle and self.executor.workers.work_idle()

    def note_slow(self, step: Step) -> None:
        """Warn of a step that took long, at most once a minute: it delayed everybody's next token."""
        now, threshold = time.monotonic(), self.config.server.slow_step_threshold
        seconds, self.last_result = now - max(step.scheduled, self.last_result), now
        if threshold and seconds >= threshold and now >= self.next_slow_warning and self.ready is not None:
            self.next_slow_warning = now + SLOW_WARNING_INTERVAL
            stats = self.scheduler.stats()
            logger.warning(
                "a step took %.1f s: %s; %d requests wait, %.0f %% of the KV cache is used",
                seconds,
                step.contents(),
                stats.num_waiting,
                100 * stats.kv_cache_usage,
            )

    def receive(self) -> None:
        """Handle all received messages. With no work, sleep until a message arrives.

        While the workers' kernels are being compiled, an idle engine polls for them, so that no request pays for the
        switch. Raises RuntimeError if a worker process died while the engine was idle.
        """
        idle = not self.in_flight and not self.scheduler.requests and not self.jobs
        if self.publisher is not None and (events := self.scheduler.kv.pool.events.take()):
            self.publisher.publish(events)
        if idle:
            self.send_stats()
            if self.socket.wait(self.idle_wait()):
                raise RuntimeError("a worker process died")
        messages = self.socket.receive()
        for client, message in messages:
            self.handle(client, message)
        if idle and not messages and self.awaits_ops:
            self.awaits_ops = self.executor.workers.look_for_ops()
        self.save_some(idle)
        if idle and not messages:
            self.give_back_memory()
        elif not idle:
            self.cache_used_at = time.monotonic()
            self.give_back_some(self.cache_used_at)

    def idle_wait(self) -> float | None:
        """Seconds to sleep without a message."""
        if self.works_idle:
            return 0.0
        if self.awaits_ops:
            return OPS_POLL_INTERVAL
        if self.scheduler.tiers is not None and self.scheduler.tiers.num_unsaved:
            return max(self.save_due - time.monotonic(), 0.01)
        if self.written_due:
            return max(self.written_due - time.monotonic(), 0.01)
        return GIVE_BACK_INTERVAL if self.gives_back and self.cache_used_at is not None else None

    def save_some(self, idle: bool) -> None:
        """Have hot blocks written to disk now and then, more of them while no request runs."""
        tiers, now = self.scheduler.tiers, time.monotonic()
        if self.written_due and now >= self.written_due:
            self.written_due = 0.0
            self.schedule_stats()
        if tiers is None or not tiers.num_unsaved or now < self.save_due:
            return
        most = SAVED_AT_ONCE if idle else self.saved_blocks
        given = self.scheduler.contents.save(most)
        # an idle engine goes on at once, but looks for messages in between
        self.save_due = now + (SAVE_RETRY if not given else 0.0 if idle else SAVE_INTERVAL)
        self.written_due = now + WRITTEN_AFTER

    def give_back_memory(self) -> None:
        """Return the KV cache's memory to the system, and forget cached prefixes, if the workers find that it is time:
        after a long time without a request, or when the machine is short of memory.
        """
        if not self.gives_back or self.cache_used_at is None:
            return
        idle = time.monotonic() - self.cache_used_at
        if self.executor.workers.wants_memory_back(idle) and self.scheduler.kv.reset_prefix_cache():
            self.executor.workers.give_back()
            self.scheduler.kv.pool.give_back_all()
            self.cache_used_at = None
            logger.info("idle for %.0f s: gave the memory of the KV cache back", idle)

    def give_back_some(self, now: float) -> None:
        """While requests run and the machine is short of memory: return the memory of as many blocks that none of them
        holds, cached prefixes last, but for those that the next step may take.
        """
        if not self.gives_back or now < self.give_back_due:
            return
        self.give_back_due, worker = now + BUSY_GIVE_BACK_INTERVAL, self.ready.worker
        was_short, short = self.is_short, self.executor.workers.memory_short()
        self.is_short = short > 0
        if not self.is_short:
            return
        spare = -(-worker.max_num_batched_tokens // worker.block_size)
        given = self.scheduler.kv.pool.give_back(-(-short // max(worker.plan.bytes_per_block, 1)), spare)
        self.executor.workers.give_back_blocks(given)
        if given and not was_short:
            logger.info("the machine is short of memory: gave back that of %d free blocks of the KV cache", len(given))

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
                self.schedule_stats()
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
        if outputs:
            self.post(client, StepOutputs(outputs))
        self.schedule_stats()

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

    def abort(self, outputs: Outputs) -> None:
        """Send the last outputs of requests that were ended."""
        for client, client_outputs in outputs.items():
            self.post(client, StepOutputs(client_outputs))
        self.schedule_stats()

    # ---- sending messages

    def send(self, outputs: Outputs) -> None:
        """Send each server its outputs, with statistics when they are due."""
        self.schedule_stats()
        if time.monotonic() >= self.stats_due:
            self.send_stats(outputs)
        else:
            for client, client_outputs in outputs.items():
                self.post(client, StepOutputs(client_outputs))

    def schedule_stats(self) -> None:
        """Schedule a statistics message, unless one is already scheduled."""
        self.stats_due = self.stats_due or time.monotonic() + STATS_INTERVAL

    def send_stats(self, outputs: Outputs | None = None) -> None:
        """Send statistics since the last message to every server, together with its `outputs`."""
        if not self.stats_due:
            return
        self.stats_due, stats, outputs = 0.0, self.scheduler.flush_stats(), outputs or {}
        for client in self.clients | outputs.keys():
            self.post(client, StepOutputs(outputs.get(client, []), stats))

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
        self.depth, self.works_idle = steps_in_flight(self.config, ready), ready.works_idle
        self.gives_back = ready.gives_back
        kv = KVCacheManager(
            ready.num_blocks,
            ready.block_size,
            self.config.cache.enable_prefix_caching and not (ready.pooling and ready.pooling.whole_prompts),
            ready.groups,
            ready.max_num_batched_tokens,
            bool(ready.media and ready.media.whole),
            ready.num_states,
        )
        stages = self.config.parallel.pipeline_parallel_size
        self.scheduler = Scheduler(self.config.scheduler, ready, kv, stages, self.open_tiers(ready, kv))
        self.calls = Calls(self.scheduler, self.executor.workers, self.abort)
        self.report_progress("warming up", 0.0)
        self.warm_up()
        self.publish_events(kv)
        least = self.config.cache.cache_reuse
        if ready.has_slot_files or least:
            self.scheduler.contents.open_slots(self.executor.slots, self.index, least)
        self.awaits_ops = self.executor.workers.look_for_ops()
        gc.collect()
        # exclude the objects loaded so far from later garbage collections: they live as long as the process
        gc.freeze()
        self.ready = Ready(ready, self.depth)
        self.broadcast(self.ready)
        for client, message in self.early_messages:
            self.handle(client, message)
        self.early_messages.clear()

    def publish_events(self, kv: KVCacheManager) -> None:
        """Begin to publish KV events, if the settings ask for it."""
        text = self.config.cache.kv_events_config
        settings = read_kv_events(text) if text else None
        if settings is not None and kv.enable_prefix_caching:
            num_left = LEFT_POOLS * (kv.pool.num_usable + kv.pool.num_states) if self.scheduler.tiers is not None else 0
            kv.pool.events = KVEventLog(kv.block_size, kv.groups, num_left)
            if self.scheduler.tiers is not None:
                self.scheduler.tiers.calls.watch()
            self.publisher = KVEventPublisher(settings, self.index)

    def open_tiers(self, ready: WorkerReady, kv: KVCacheManager) -> Tiers | None:
        """The tiers below the pool, if there are any."""
        self.saved_blocks = min(max(SAVED_BYTES // max(ready.plan.bytes_per_block, 1), 1), SAVED_AT_ONCE)
        return tiers_below(kv, ready, self.executor.tiers)

    def save_hot(self) -> None:
        """Before the end: write the hot blocks that no request holds to disk. An error ends that, and nothing else."""
        tiers, deadline = self.scheduler.tiers, time.monotonic() + SAVE_TIMEOUT
        try:
            while tiers is not None and time.monotonic() < deadline:
                given = self.scheduler.contents.save(SAVED_AT_ONCE, only_free=True)
                tiers.calls.flush(max(deadline - time.monotonic(), 0.0))
                if not given:
                    break
        except Exception:
            logger.exception("could not write all of the KV cache to disk")

    def report_progress(self, phase: str, fraction: float) -> None:
        """Called while loading: send progress to the servers and answer those that connect meanwhile."""
        last, self.progress = self.progress, Progress(phase, fraction)
        for client, message in self.socket.receive():
            self.handle(client, message)
        if phase != last.phase or fraction - last.fraction >= 0.01 or fraction >= 1:
            self.broadcast(self.progress)
        else:
            self.progress = last  # too small a change to report

    def warm_up(self) -> None:
        """Run one short request, prefill and, if the model generates, decode, through scheduler and workers, then clear
        the prefix cache and the counts.

        Raises RuntimeError if it fails.
        """
        prompt = [0] * min(4, max(self.scheduler.max_model_len - 2, 1))
        sampling, pooling = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True), None
        if (info := self.scheduler.pooling) and not info.generates:
            sampling, pooling = SamplingParams(max_tokens=0), PoolingParams(info.tasks[0])
        self.scheduler.add(AddRequest("warm-up", prompt, sampling, pooling=pooling))
        while step := self.scheduler.schedule():
            for output in self.scheduler.update(step, self.executor.execute(step.input).result()).get(b"", []):
                if output.error:
                    raise RuntimeError(f"the warm-up step failed: {output.error}")
        self.scheduler.kv.reset_prefix_cache()
        self.scheduler.flush_stats()

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

    def kill(self) -> None:
        """Kill this process and all its descendants at once, from any thread. Called when the parent died and cannot
        clean up.
        """
        kill_descendants()
        remove_files()
        self.socket.unlink()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def read_config(fd: int) -> Config:
    """Read the length-prefixed configuration from `fd`. Raises EOFError if it is incomplete."""

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := os.read(fd, count - len(data))):
                raise EOFError("stdin ended before the configuration")
            data += part
        return data

    return msgspec.msgpack.decode(read(int.from_bytes(read(4), "big")), type=Config)


def _exit_on_signal(*_: Any) -> None:
    sys.exit(0)


def _request_exit() -> None:
    """Ask the main thread to shut down, from another thread. The signal also interrupts a sleep or a poll."""
    signal.pthread_kill(threading.main_thread().ident, EXIT_SIGNAL)


def _flush_stderr() -> None:
    # a full disk or a closed pipe must not prevent the exit
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def main() -> None:
    """Run the engine process. Does not return."""
    # Ctrl-C reaches the whole process group; the parent decides when to shut down
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(EXIT_SIGNAL, _exit_on_signal)
    end_with_parent()
    dump_stacks_on(signal.SIGUSR2, "engine")
    set_name("quire-engine")
    socket = ServerSocket(sys.argv[1])
    socket.watch(wake_on_signals())
    config = read_config(sys.stdin.fileno())
    start_logging(config.server, "engine")
    core = EngineCore(config, socket, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    watch_parent(sys.stdin.fileno(), _request_exit, core.kill)
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
            if core.ready:
                core.save_hot()
            if core.publisher is not None:
                core.publisher.stop()
            core.executor.shutdown()
        _flush_stderr()
        os._exit(exit_code)  # everything is cleaned up, and tearing down an interpreter with torch is slow


if __name__ == "__main__":
    main()
