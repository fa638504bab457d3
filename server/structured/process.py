"""The parent's side of a process that compiles structures (`compile_process.py`)."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from quire.server.structured.structure import Answer

# Seconds without progress until a process is killed: it is stopped, or gets no CPU time. A process that gets some runs
# on until its own limit of CPU time, however long that takes on a busy machine.
MAX_SILENCE = 10.0
_INTERVAL = 0.25  # seconds between two looks at its progress
_TO_END = 1.0  # seconds for a killed process to exit; later, `subprocess` collects it


class ProcessDied(Exception):
    """The process ended, or was killed, before it answered."""


class Silence:
    """The time that a process has made no progress. `progress` is a number that changes with progress."""

    def __init__(self, progress: Callable[[], float], clock: Callable[[], float] = time.monotonic):
        self._progress, self._clock = progress, clock
        self._seen, self._since = progress(), clock()

    def seconds(self) -> float:
        seen, now = self._progress(), self._clock()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class CompileProcess:
    """A child that runs `compile_process.py`. Used by one thread at a time, except for `kill`."""

    def __init__(self, vocabulary: bytes):
        self._greeting: bytes | None = vocabulary
        self._child: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.max_silence = MAX_SILENCE

    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def ask(self, structure: bytes) -> Answer:
        """Return the answer; the first call starts the child. Raises ProcessDied after the end of the child."""
        try:
            self._start()
            silence = Silence(self._cpu_time)
            frames = [structure] if self._greeting is None else [self._greeting, structure]
            self._greeting = None
            for frame in frames:
                self._write(len(frame).to_bytes(4, "big") + frame, silence)
            size = int.from_bytes(self._read(4, silence), "big")
            return msgspec.msgpack.decode(self._read(size, silence), type=Answer)
        except TimeoutError:
            reason = f"no progress for {self.max_silence:g} s"
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:  # ValueError: closed by `end`
            reason = f"{type(error).__name__} {error}".strip()
        self.end()
        raise ProcessDied(reason)

    def kill(self) -> None:
        """Let the thread in `ask` see its end. `end` must follow."""
        self._killed = True
        if self._child is not None:
            self._child.kill()  # no error if it has ended

    def end(self) -> None:
        """End the child and close its pipes. Idempotent; never raises."""
        self.kill()
        if self._child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_TO_END)
        for pipe in (self._child.stdin, self._child.stdout):  # unbuffered: no data is left to write
            pipe.close()

    def _start(self) -> None:
        if self._child is not None:
            return
        self._child = subprocess.Popen(
            [sys.executable, "-m", "quire.server.structured.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        if self._killed:  # killed before the child started
            self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            os.set_blocking(pipe.fileno(), False)

    def _cpu_time(self) -> float:
        """Return seconds of CPU time that the child has used; 0 on systems without /proc, where it has to answer in
        time.
        """
        try:
            with open(f"/proc/{self._child.pid}/stat", "rb") as file:
                user, system = file.read().rpartition(b")")[2].split()[11:13]
        except OSError:  # no /proc, or it has ended, which its pipes show
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _write(self, data: bytes, silence: Silence) -> None:
        view, pipe = memoryview(data), self._child.stdin.fileno()
        while view:
            self._until(pipe, select.POLLOUT, silence)
            view = view[os.write(pipe, view[: select.PIPE_BUF]) :]

    def _read(self, size: int, silence: Silence) -> bytes:
        data, pipe = bytearray(), self._child.stdout.fileno()
        while len(data) < size:
            self._until(pipe, select.POLLIN, silence)
            part = os.read(pipe, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _until(self, pipe: int, event: int, silence: Silence) -> None:
        """Wait for an event of a pipe, or its end. Raises TimeoutError."""
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(_INTERVAL * 1000):
            if silence.seconds() >= self.max_silence:
                raise TimeoutError
