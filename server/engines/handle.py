"""What the routes need of an engine. `EngineClient` is one engine, `EnginePool` several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.engine.messages import AddRequest, Ready

if TYPE_CHECKING:
    from quire.server.engines.client import OutputStream


class EngineHandle(Protocol):
    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready; None while it loads or is replaced."""

    @property
    def num_open(self) -> int:
        """Choices that this process has sent and that are not finished."""

    @property
    def load(self) -> int:
        """Unfinished choices in the engine, those of other frontends included."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of this process's requests that have had no output yet."""

    def generate(self, request: AddRequest) -> OutputStream:
        """Send a request. Raises ValueError if its request_id is in use."""

    async def call(self, method: str, *args: Any, timeout: float = 10.0) -> Any:
        """Call a method of the engine. Raises EngineCallError, EngineUnavailable, TimeoutError."""

    async def close(self, reason: str = ...) -> None:
        """Fail every open request, and every later one. Idempotent."""
