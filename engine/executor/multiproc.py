"""One worker process per rank, connected by a pipe.

A pipe is a FIFO, which is all the ordering that steps need. (A ring in shared memory would deliver a step of 256
requests 25 us to 75 us earlier, to processes that poll it instead of sleeping. For steps that take milliseconds, that
does not justify a second mechanism.) EOF is the signal to stop, in both directions: a worker exits when its pipe ends,
and a worker that dies ends its pipe. A message is one byte that names its kind, and a payload.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec

from quire.configs import platforms
from quire.configs.config import Config
from quire.configs.sockets import bind
from quire.configs.stacks import STACKS_FOLDER
from quire.engine.executor.base import OF_ALL, Executor, Pending, ReportProgress, first_reason
from quire.engine.executor.nodes import RemoteRanks, exit_with, join, use_interface
from quire.engine.process import RENDEZVOUS, die_with_parent, dump_stacks_on, no_collection, start_logging
from quire.worker.host import torch_start
from quire.worker.messages import StepInput, StepOutput, WorkerReady

STEP, CALL = b"S", b"C"  # to a worker
PROGRESS, READY, OUTPUT, VALUE, USER_ERROR, ERROR = b"P", b"R", b"O", b"V", b"U", b"E"  # from a worker

REFUSED = 3  # exit code of a rank that the first node refused
SHUTDOWN_TIMEOUT = 5.0  # seconds after which workers that do not exit are killed

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_step = msgspec.msgpack.Decoder(StepInput).decode
_decode_output = msgspec.msgpack.Decoder(StepOutput).decode


class MultiprocExecutor(Executor):
    """Starts one worker process per rank. Every rank receives every message; the first rank of the last pipeline stage
    answers.

    The death of any rank is an error of the executor.
    """

    worker_class = "quire.worker.worker:Worker"

    def __init__(self, config: Config):
        self._config = config
        self._world_size = config.parallel.world_size
        self._answering = self._world_size - config.parallel.tensor_parallel_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outputs: deque[StepOutput] = deque()  # received, not requested yet
        self._rendezvous: Path | None = None
        self._remote: RemoteRanks | None = None  # ranks of other machines
        self._folder: tempfile.TemporaryDirectory | None = None  # folder of the rendezvous file, if the engine has none

    def initialize(self, progress: ReportProgress) -> WorkerReady:
        init_method, parallel = None, self._config.parallel
        if parallel.nnodes > 1:
            init_method = f"tcp://{parallel.master_addr}:{_free_port(parallel.master_addr)}"
        elif self._world_size > 1:
            init_method = f"file://{self._make_rendezvous()}"
        for rank in range(parallel.ranks_per_node):
            ours, theirs = multiprocessing.Pipe()
            place = Place(rank, self._world_size, init_method, rank == self._answering)
            self._processes.append(self._spawn(self.worker_class, self._config, place, theirs))
            theirs.close()  # the worker holds the only copy: its death ends the pipe
            self._pipes.append(ours)
        if parallel.nnodes > 1:
            self._remote = RemoteRanks(self._config, self._check_local)
            self._remote.meet(init_method)
            self._pipes += [pipe for _, pipe in sorted(self._remote.pipes.items())]
        found: dict[int, WorkerReady] = {}
        while len(found) < self._world_size:
            rank, kind, payload = self._receive()
            if kind == READY:
                found[rank] = msgspec.msgpack.decode(payload, type=WorkerReady)
            elif rank == 0:
                progress(*msgspec.msgpack.decode(payload, type=tuple[str, float]))
        if len({(ready.num_blocks, ready.block_size, ready.max_model_len) for ready in found.values()}) > 1:
            raise RuntimeError(f"the ranks do not agree on the size of the KV cache: {found}")
        return found[0]

    @staticmethod
    def _spawn(
        worker_class: str, config: Config, place: Place, pipe: Connection
    ) -> multiprocessing.process.BaseProcess:
        """Return the process of a rank, started."""
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks and a CUDA context
        args = worker_class, config, place, pipe
        process = context.Process(target=worker_main, args=args, name=f"worker {place.rank}", daemon=True)
        process.start()
        return process

    def _check_local(self) -> None:
        """Raise RuntimeError if a rank of this node has ended."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                raise self._death(rank)

    def _make_rendezvous(self) -> Path:
        """Return the path of the file through which the ranks find each other. It is in the engine's folder, or in a
        new one, which only this user can enter.

        A port would be open to every user of this machine.
        """
        folder = os.environ.get(STACKS_FOLDER)
        if folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="quire-")
            folder = self._folder.name
        self._rendezvous = Path(folder, RENDEZVOUS)
        self._rendezvous.unlink(missing_ok=True)
        return self._rendezvous

    def execute(self, step: StepInput) -> Pending:
        self._send(STEP + _encode(step))
        return _Reply(self)

    def call(self, method: str, *args: Any) -> Any:
        self._send(CALL + _encode((method, args)))
        values, missing = {}, self._world_size if method in OF_ALL else 1
        while len(values) < missing:
            rank, kind, payload = self._receive_answer()
            if kind == VALUE:
                values[rank] = msgspec.msgpack.decode(payload)
        return first_reason(values.values()) if method in OF_ALL else values[self._answering]

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:  # stuck, possibly waiting for another rank
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
        elif self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)

    def kill(self) -> None:
        for process in list(self._processes):
            process.kill()

    def sentinels(self) -> list[int]:
        remote = [] if self._remote is None else [self._remote.sentinel]
        return [process.sentinel for process in self._processes] + remote

    def next_output(self) -> StepOutput:
        """Return the output of the oldest step that was not requested yet. Raises RuntimeError when a worker fails or
        dies.
        """
        while not self._outputs:
            self._receive_answer()
        return self._outputs.popleft()

    def _send(self, message: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                raise self._death(rank) from None

    def _receive_answer(self) -> tuple[int, bytes, bytes]:
        """Return the next message of a rank that answers; outputs are also queued."""
        rank, kind, payload = self._receive()
        if kind == OUTPUT:
            assert rank == self._answering, f"rank {rank} answered"
            self._outputs.append(_decode_output(payload))
        return rank, kind, payload

    def _receive(self) -> tuple[int, bytes, bytes]:
        """Wait for the next message of any rank: (rank, kind, payload).

        Raises ValueError or RuntimeError if the rank reports an error or dies.
        """
        pipe = wait(self._pipes)[0]
        rank = self._pipes.index(pipe)
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._death(rank) from None
        kind, payload = message[:1], message[1:]
        if kind == USER_ERROR:
            raise ValueError(payload.decode())
        if kind == ERROR:
            raise RuntimeError(f"worker {rank} failed:\n{payload.decode()}")
        return rank, kind, payload

    def _death(self, rank: int) -> RuntimeError:
        if rank >= len(self._processes):
            return RuntimeError(self._remote.describe(rank))
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return RuntimeError(f"worker {rank} died ({how})")


class _Reply:
    """A step in flight. Replies arrive in the order of the steps."""

    def __init__(self, executor: MultiprocExecutor):
        self._executor = executor

    def result(self) -> StepOutput:
        return self._executor.next_output()


class Place(NamedTuple):
    """A rank of the model. Exactly one rank `answers`; `init_method` is where the ranks meet, None for a single one."""

    rank: int
    world_size: int
    init_method: str | None
    answers: bool


def worker_main(worker_class: str, config: Config, place: Place, pipe: Connection) -> None:
    """Run the process of a rank of this machine. Exits when its pipe ends, or after reporting an error."""
    _begin(config, place.rank)
    dump_stacks_on(signal.SIGUSR2, f"worker {place.rank}")
    _run(worker_class, config, place, pipe)


def remote_main(config: Config, rank: int, joined: Event) -> None:
    """Run the process of a rank on another node: join the first node, then serve as its ranks do. Sets `joined`."""
    _begin(config, rank)
    try:
        config, init_method, pipe = join(config, rank)
    except ValueError as error:
        logger.error("the first node refuses rank %d: %s", rank, error)
        os._exit(REFUSED)
    joined.set()
    exit_with(pipe)
    parallel = config.parallel
    answers = rank == parallel.world_size - parallel.tensor_parallel_size
    _run(MultiprocExecutor.worker_class, config, Place(rank, parallel.world_size, init_method, answers), pipe)


def _begin(config: Config, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when workers stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    platforms.name_process(f"quire-worker-{rank}")
    start_logging(config.server, f"worker {rank}")


def _run(worker_class: str, config: Config, place: Place, pipe: Connection) -> None:
    """Make the worker of a rank and serve the pipe. Does not return."""
    exit_code, parallel, where = 0, config.parallel, {}
    if parallel.nnodes > 1:
        use_interface(parallel.master_addr)
        where = {"local_rank": place.rank % parallel.ranks_per_node, "local_size": parallel.ranks_per_node}
    else:  # all ranks are on this machine, so loopback is enough
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        module, _, name = worker_class.partition(":")
        torch_start.postpone()
        with no_collection():
            imported = importlib.import_module(module)
        worker = getattr(imported, name)(config, place.rank, place.world_size, place.init_method, **where)
        _serve(worker, pipe, place.answers)
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        exit_code = 1
        _report(pipe, error)
    os._exit(exit_code)


def _serve(worker: Any, pipe: Connection, answers: bool) -> None:
    """Initialize the worker, then run steps and calls until the pipe ends.

    A thread awaits and sends results, so that the next step is launched while the device still runs this one.
    """
    try:
        ready = worker.initialize(lambda phase, fraction: pipe.send_bytes(PROGRESS + _encode((phase, fraction))))
    except ValueError as error:
        pipe.send_bytes(USER_ERROR + str(error).encode())
        raise EOFError from error
    pipe.send_bytes(READY + _encode(ready))
    results: SimpleQueue = SimpleQueue()
    threading.Thread(target=_reply, args=(results, pipe), name="reply", daemon=True).start()
    while True:
        message = pipe.recv_bytes()
        if message[:1] == STEP:
            results.put((OUTPUT, worker.execute(_decode_step(message[1:])), answers))
        else:
            method, args = msgspec.msgpack.decode(message[1:])
            results.put((VALUE, attrgetter(method)(worker)(*args), answers or method in OF_ALL))


def _reply(results: SimpleQueue, pipe: Connection) -> None:
    """Wait for each result in turn, and send it if this rank answers."""
    try:
        while True:
            kind, value, answers = results.get()
            value = value.result() if kind == OUTPUT else value
            if answers:
                pipe.send_bytes(kind + _encode(value))
    except ConnectionError:
        os._exit(0)
    except BaseException as error:
        _report(pipe, error)
        os._exit(1)


def _free_port(address: str) -> int:
    with bind(address, 0, f"--master-addr {address}") as probe:
        return probe.getsockname()[1]


def _report(pipe: Connection, error: BaseException) -> None:
    try:
        pipe.send_bytes(ERROR + "".join(traceback.format_exception(error)).encode())
    except OSError:
        traceback.print_exception(error)  # the engine is gone: print to stderr
