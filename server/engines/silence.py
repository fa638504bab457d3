"""Measures how long a busy engine has sent no message. A working engine sends one after every step, or 4 per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.engines.client import EngineClient


class Silence:
    """The seconds since the last message of the engine of `client`, while `is_busy`. Counted in ticks of our event
    loop, so that time for which the loop was blocked does not count."""

    def __init__(self, client: EngineClient, is_busy: Callable[[], bool]):
        self._client, self._is_busy = client, is_busy
        self._num_messages = -1
        self.seconds = 0.0

    def tick(self, seconds: float) -> None:
        """Add the `seconds` since the last tick, or restart at 0 after a message."""
        silent = self._client.num_messages == self._num_messages and self._is_busy()
        self._num_messages = self._client.num_messages
        self.seconds = self.seconds + seconds if silent else 0.0
