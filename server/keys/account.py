"""The account of one accepted request: its use, and the key that is charged."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.server.errors import TooManyRequests
from quire.server.keys.audit import AuditLog
from quire.server.keys.caller import Caller
from quire.server.keys.key import Key
from quire.server.request.usage import TokenUsage

if TYPE_CHECKING:
    from quire.server.keys.request_log import RequestLog
    from quire.server.keys.ring import KeyRing
    from quire.server.request.delta import Delta
    from quire.server.request.generation_request import GenerationRequest
    from quire.server.request.sink import MetricsSink
    from quire.server.traces import Traces

logger = logging.getLogger("quire.keys")


class Accounts(Protocol):
    """The counters of requests; each is None if it is not configured."""

    names: list[str]
    num_waiting_of: Counter[str]
    keys: KeyRing | None
    audit: AuditLog | None
    request_log: RequestLog | None
    traces: Traces | None
    metrics: MetricsSink | None


@dataclass(slots=True)
class Account:
    """The account of a request, opened when it is admitted, closed when its answer has ended."""

    state: Accounts
    caller: Caller
    key: Key | None
    requests: Sequence[GenerationRequest]
    route: str
    headers: Mapping[str, str]  # for the request
    preparation: float = 0.0  # seconds from its arrival until it was accepted
    num_waiting: int = 0  # choices waiting for a first token, limited per key
    finish_reasons: set[str] = field(default_factory=set)
    opened: float = field(default_factory=time.time)
    used: TokenUsage = field(init=False)

    def __post_init__(self) -> None:
        self.used = TokenUsage.for_requests(self.requests)
        if self.key is not None and not self.caller.background:
            self.num_waiting = sum(one.n for one in self.requests)
            self.state.num_waiting_of[self.key.name] += self.num_waiting

    @property
    def _arrived(self) -> float:
        """Return time.time() of the request's first byte, as exactly as it is known."""
        return self.opened - self.preparation

    def _start_choices(self, num_choices: int) -> None:
        """Record that choices wait no longer."""
        if self.num_waiting:
            self.num_waiting -= num_choices
            self.state.num_waiting_of[self.key.name] -= num_choices

    async def observed(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield `deltas` after counting them."""
        started: set[int] = set()
        try:
            async for delta in deltas:
                if delta.index not in started:
                    started.add(delta.index)
                    self._start_choices(1)
                self.used.add(delta)
                if delta.finish_reason is not None:
                    self.finish_reasons.add(delta.finish_reason)
                yield delta
        finally:
            await deltas.aclose()

    def close(self, status: int | None) -> None:
        """Close the account; `status` is the answer's, None if the client left before an answer."""
        state, key, used = self.state, self.key, self.used
        self._start_choices(self.num_waiting)
        if key is not None and key.is_limited:
            try:
                state.keys.ledger.end(key, used.num_output, self.caller.background)
            except sqlite3.Error as error:
                logger.error("the use of key '%s' could not be counted: %s", key.name, error)
        if key is not None and state.metrics is not None:
            state.metrics.observe_key(key.name, used.num_prompt, used.counts.cached, used.num_output)
        if (log := state.audit) is not None:
            log.write(self._row(status))
        if state.traces is not None:
            attributes = {
                "gen_ai.request.id": self.caller.request_id,
                "http.route": self.route,
                "gen_ai.usage.input_tokens": used.num_prompt,
                "gen_ai.usage.output_tokens": used.num_output,
                "gen_ai.response.finish_reasons": sorted(self.finish_reasons),
            }
            state.traces.record(self.headers, self.requests, self._arrived, self.opened, time.time(), attributes)

    def _row(self, status: int | None) -> dict[str, object]:
        """Return the counts of a request, never content."""
        used = self.used
        return {
            "time": AuditLog.timestamp(self.opened),
            "request_id": self.caller.request_id,
            "key": self.key and self.key.name,
            "route": self.route,
            "model": self.state.names[0],
            "background": self.caller.background,
            "status": status,
            "finish_reasons": sorted(self.finish_reasons),
            "prompt_tokens": used.num_prompt,
            "cached_tokens": used.counts.cached,
            "completion_tokens": used.num_output,
            "seconds": round(time.time() - self.opened, 6),
        }


def key_of(caller: Caller, state: Accounts) -> Key | None:
    """Return the owner of the request; for a batch line, of the batch."""
    if caller.background and state.keys is not None and caller.owner:
        return state.keys.key_of_owner(caller.owner)
    return caller.key


def open_account(
    caller: Caller,
    state: Accounts,
    requests: Sequence[GenerationRequest],
    route: str,
    headers: Mapping[str, str],
) -> None:
    """Charge a request, whose answer gets the headers of its limits. Raises TooManyRequests, Unavailable."""
    key = key_of(caller, state)
    if key is None and state.audit is None and state.traces is None:
        _log(caller, state, None, route, requests)
        return
    num_tokens = sum(len(one.prompt_token_ids) for one in requests)
    if key is not None and key.is_limited:
        try:
            if caller.background:
                state.keys.ledger.begin_in_background(key, num_tokens)
            else:
                caller.limits = state.keys.ledger.begin(key, num_tokens)
        except TooManyRequests as error:
            caller.limits = error.limits
            if state.metrics is not None:
                state.metrics.observe_key_refusal(key.name, error.code)
            raise
    preparation = 0.0
    if caller.arrived is not None:
        preparation = max(asyncio.get_running_loop().time() - caller.arrived, 0.0)
    caller.account = Account(state, caller, key, requests, route, headers, preparation)
    _log(caller, state, key.name if key is not None else None, route, requests)


def _log(caller: Caller, state: Accounts, key: str | None, route: str, requests: Sequence[GenerationRequest]) -> None:
    if state.request_log is not None:
        state.request_log.write(caller, key, route, requests)
