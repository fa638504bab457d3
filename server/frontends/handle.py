"""The launcher's interface to the HTTP side. `Frontend` serves in the launcher's process, `FrontendGroup` in several
child processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.engine.messages import EngineStats, Progress

if TYPE_CHECKING:
    from quire.server.engines.client import EngineClient


class FrontendHandle(Protocol):
    @property
    def num_in_flight(self) -> int:
        """Return the number of HTTP requests being answered, except probes."""

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template; known once it is loaded."""

    async def serve(self) -> None:
        """Accept connections until `end`."""

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Load the tokenizer. Raises ValueError for missing or malformed files."""

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """Return a client per engine, not yet connected. The callbacks get the engine's index first."""

    def progress(self, phase: str, fraction: float) -> None:
        """Record the progress of startup."""

    def open(self) -> None:
        """Serve requests if everything is loaded. Called whenever an engine becomes ready."""

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Publish an engine's statistics."""

    def on_death(self, engine: int) -> None:
        """Handle the death of an engine, after its client was notified."""

    def refuse(self) -> None:
        """Refuse new requests from now on."""

    async def drain(self) -> None:
        """Wait for running requests up to the shutdown timeout, then fail the rest."""

    async def fail(self, reason: str) -> None:
        """Fail every request, because no engine will run again."""

    async def end(self) -> None:
        """Make `serve` return."""

    def kill(self) -> None:
        """End child processes at once."""
