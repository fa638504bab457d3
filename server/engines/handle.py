"""The engine interface of the routes. `EngineClient` implements it for one engine, `EnginePool` for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

from quire.engine.messages import AddRequest, EngineCalls, Ready

if TYPE_CHECKING:
    from quire.server.engines.client import OutputStream

T = TypeVar("T")
Args = TypeVarTuple("Args")


class EngineHandle(Protocol):
    @property
    def ready(self) -> Ready | None:
        """Return the engine's `Ready` message; None while it loads or is replaced."""

    @property
    def num_open(self) -> int:
        """Return the number of unfinished choices that this process has sent."""

    @property
    def load(self) -> int:
        """Return the number of unfinished foreground choices in the engine, including those of other frontends."""

    @property
    def num_waiting_tokens(self) -> int:
        """Return the number of prompt tokens of this process's foreground requests without output."""

    def generate(self, request: AddRequest) -> OutputStream:
        """Send a request. Raises ValueError if its request_id is in use."""

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Send the tokens that grammars need, a `Vocabulary` as msgpack, now and to every later engine."""

    async def call(self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0) -> T | list[T]:
        """Call a method of all engines. Returns their common answer, or the list of answers if they differ. Raises
        EngineCallError, EngineUnavailable, TimeoutError.
        """

    async def call_each(
        self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0
    ) -> list[T]:
        """Return the answer of each engine. Raises as `call`."""

    async def close(self, reason: str = ...) -> None:
        """Fail every open request, and every later one. Idempotent."""
