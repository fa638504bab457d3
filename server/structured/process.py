"""The parent's side of a process that compiles structures (`compile_process.py`)."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from quire.server.structured.structure import Answer

# Seconds of wall time until a process that does not answer is killed, twice as many for its first answer. Its own
# limit is one of CPU time; this one is for a process that is stopped, or gets no CPU at all.
TIMEOUT = 60.0


class ProcessDied(Exception):
    """The process ended, or was killed, before it answered."""


class CompileProcess:
    """A child that runs `compile_process.py`. Used by one thread at a time, but for `kill`."""

    def __init__(self, vocabulary: bytes):
        self._child = subprocess.Popen(
            [sys.executable, "-m", "quire.server.structured.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        for pipe in (self._child.stdin, self._child.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._greeting: bytes | None = vocabulary

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, structure: bytes) -> Answer:
        """Raises ProcessDied."""
        frames, timeout = [structure], TIMEOUT
        if self._greeting is not None:
            frames, timeout, self._greeting = [self._greeting, structure], 2 * TIMEOUT, None
        deadline = time.monotonic() + timeout
        try:
            for frame in frames:
                self._write(len(frame).to_bytes(4, "big") + frame, deadline)
            size = int.from_bytes(self._read(4, deadline), "big")
            return msgspec.msgpack.decode(self._read(size, deadline), type=Answer)
        except TimeoutError:
            raise ProcessDied(f"no answer after {timeout:.0f} s") from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:  # ValueError: closed by `end`
            raise ProcessDied(f"{type(error).__name__} {error}".strip()) from None

    def kill(self) -> None:
        """Let the thread in `ask` see its end. `end` must follow."""
        self._child.kill()

    def end(self) -> None:
        """Idempotent; never raises."""
        self._child.kill()  # no error if it has ended
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):  # unbuffered: nothing is left to write
            pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        view, pipe = memoryview(data), self._child.stdin.fileno()
        while view:
            _until(pipe, select.POLLOUT, deadline)
            view = view[os.write(pipe, view[: select.PIPE_BUF]) :]

    def _read(self, size: int, deadline: float) -> bytes:
        data, pipe = bytearray(), self._child.stdout.fileno()
        while len(data) < size:
            _until(pipe, select.POLLIN, deadline)
            part = os.read(pipe, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _until(pipe: int, event: int, deadline: float) -> None:
    """Wait for an event of a pipe, or its end. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        raise TimeoutError
