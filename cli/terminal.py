"""Reads lines that a user types, with editing and history, and messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_HISTORY = 1000  # lines
QUOTES = '"""'


def read_messages(prompt: str) -> Iterator[str]:
    """Yield messages from the terminal or stdin: a line; lines that end with a backslash and the next one; or the lines
    between a pair of triple quotation marks. Ctrl-C drops an incomplete one.
    """
    message = _Message()
    for line in read_lines(lambda: "... " if message.lines or message.quoted else prompt):
        if line is None:
            message.take()
        elif message.add(line):
            yield message.take()
    if message.lines:
        yield message.take()


class _Message:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.quoted = False

    def take(self) -> str:
        """Return the message and begin the next one."""
        text, self.quoted = "\n".join(self.lines).strip("\n"), False
        self.lines.clear()
        return text

    def add(self, line: str) -> bool:
        """Return whether the message is complete with `line`."""
        if not self.quoted and not self.lines and line.lstrip().startswith(QUOTES):
            self.quoted, line = True, line.lstrip()[len(QUOTES) :]
        if self.quoted:
            before, end, _ = line.partition(QUOTES)
            self.lines.append(before)
            return bool(end)
        continued = line.endswith("\\")
        self.lines.append(line[:-1] if continued else line)
        return not continued


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C end the block, not the program."""
    try:
        yield
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)


def read_lines(prompt: Callable[[], str]) -> Iterator[str | None]:
    """Yield lines from the terminal, with editing and history if readline exists, until Ctrl-D; None for Ctrl-C, which
    clears the line.

    Without a terminal: lines of stdin.
    """
    interactive = sys.stdin.isatty()
    with _history() if interactive else contextlib.nullcontext():
        while True:
            try:
                yield input(prompt() if interactive else "")
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)", file=sys.stderr)
                yield None
            except EOFError:
                if interactive:
                    print()
                return


def history_file() -> Path:
    """Return $XDG_STATE_HOME/quire/history, by default below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "quire", "history")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Keep the typed lines for the next conversation, readable by the user alone. A file that cannot be read or written
    is skipped.
    """
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    path = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            print(f"the history is not kept: {path}: {error.strerror}", file=sys.stderr)


def print_truncation(finish_reason: str | None, max_tokens: int | None) -> None:
    """Print that an answer was cut."""
    if finish_reason == "length":
        limit = f"{max_tokens} tokens" if max_tokens else "the server's limit"
        print(f"[stopped at {limit} or the end of the context; --max-tokens sets it]", file=sys.stderr, flush=True)
