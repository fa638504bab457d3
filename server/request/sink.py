"""The metrics interface of the routes. `Metrics` implements it for one engine, `MetricsPool` for several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.engine.messages import EngineStats, RequestTiming

if TYPE_CHECKING:
    from quire.server.request.generation_request import GenerationRequest


class View(msgspec.Struct, frozen=True, array_like=True):
    """`key`: the name of the only API key whose series are seen, "" for those of no key, None for those of all keys.
    `shared`: series that count the requests of all keys together are seen, too.
    """

    key: str | None = None
    shared: bool = True


ALL = View()


class EngineMetrics(Protocol):
    """Records the requests and steps of one engine. Times are in seconds."""

    def observe_stats(self, stats: EngineStats) -> None: ...

    def observe_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None: ...

    def observe_medium(self, num_tokens: int, found: bool, seconds: float) -> None: ...

    def observe_first_token(self, latency: float) -> None: ...

    def observe_tokens(self, interval: float, num_tokens: int) -> None: ...

    def observe_request(
        self,
        request: GenerationRequest,
        finish_reason: str,
        num_output_tokens: int,
        first_token_time: float,
        timing: RequestTiming | None,
    ) -> None: ...

    def observe_group(self, request: GenerationRequest, max_num_output_tokens: int) -> None: ...

    def observe_abort(self) -> None: ...


class MetricsSink(Protocol):
    def for_engine(self, engine: int) -> EngineMetrics:
        """Return the metrics that record the requests of engine `engine`."""

    def observe_http(self, handler: str, method: str, status: int) -> None: ...

    def observe_evicted(self, num: int) -> None: ...

    def observe_key(self, name: str, num_prompt: int, num_cached: int, num_output: int) -> None: ...

    def observe_key_refusal(self, name: str, code: str) -> None: ...

    def render(self, view: View = ALL) -> bytes:
        """Return the metrics in Prometheus' text format."""
