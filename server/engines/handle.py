"""The engine interface of the routes. `EngineClient` implements it for one engine, `EnginePool` for several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.engine.messages import AddRequest, Ready
from quire.server.values import Json

if TYPE_CHECKING:
    from quire.server.engines.client import OutputStream


class EngineHandle(Protocol):
    @property
    def ready(self) -> Ready | None:
        """The engine's `Ready` message; None while it loads or is replaced."""

    @property
    def num_open(self) -> int:
        """Unfinished choices that this process has sent."""

    @property
    def load(self) -> int:
        """Unfinished choices in the engine, including those of other frontends, without background requests."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of this process's requests without output and not in the background."""

    def generate(self, request: AddRequest) -> OutputStream:
        """Send a request. Raises ValueError if its request_id is in use."""

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Send the tokens that grammars need, a `Vocabulary` as msgpack, now and to every later engine."""

    async def call(self, method: str, *args: Json, timeout: float = 10.0) -> Any:
        """Call a method of the engine. Raises EngineCallError, EngineUnavailable, TimeoutError."""

    async def call_each(self, method: str, *args: Json, timeout: float = 10.0) -> list[Any]:
        """The same of each engine."""

    async def close(self, reason: str = ...) -> None:
        """Fail every open request, and every later one. Idempotent."""
