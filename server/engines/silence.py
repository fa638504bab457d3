"""How long an engine has said nothing although it has something to do: it speaks after every step, or 4 times a
second."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.engines.client import EngineClient


class Silence:
    """Of the engine behind `client` while `is_busy`. It is counted in ticks of our own loop, so that time in which we
    could not listen does not count."""

    def __init__(self, client: EngineClient, is_busy: Callable[[], bool]):
        self._client, self._is_busy = client, is_busy
        self._num_messages = -1
        self.seconds = 0.0

    def tick(self, seconds: float) -> None:
        """So many seconds have passed since the last tick."""
        silent = self._client.num_messages == self._num_messages and self._is_busy()
        self._num_messages = self._client.num_messages
        self.seconds = self.seconds + seconds if silent else 0.0
