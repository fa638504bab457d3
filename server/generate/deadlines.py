"""Deadlines of a request: for queueing, for the first token, and for the whole request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.engine.messages import EngineCalls
from quire.server.engines.handle import EngineHandle
from quire.server.errors import ApiError, GatewayTimeout, Unavailable

T = TypeVar("T")
_ANSWER_SECONDS = 2.0  # for the engine to report waiting requests; silent that long, it is busy with a step


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds from now; None is unlimited. `predict` counts from the first delta."""

    queue: float | None = None
    first_token: float | None = None
    total: float | None = None
    predict: float | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.queue, self.first_token, self.total, self.predict))

    def after(self, seconds: float) -> Deadlines:
        """Return the deadlines that remain after `seconds`, before the request is queued."""
        first, total = (None if one is None else max(one - seconds, 0.0) for one in (self.first_token, self.total))
        return replace(self, first_token=first, total=total)


NO_DEADLINES = Deadlines()


async def all_wait(client: EngineHandle, request_ids: Sequence[str]) -> bool:
    """Return whether no choice of a request has been scheduled yet."""
    try:
        found = await client.call_each(EngineCalls.waiting, list(request_ids), timeout=_ANSWER_SECONDS)
    except TimeoutError:
        return False
    except RuntimeError:  # no engine is ready
        return True
    return set().union(*found).issuperset(request_ids)


async def prepared(work: Awaitable[None], limits: Deadlines) -> Deadlines:
    """Run `work`, which a request needs before it is queued; return the remaining deadlines. Cancel the work and raise
    Unavailable when a deadline passes.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def not_started() -> bool:
        return True

    await within(work, replace(limits, queue=None), not_started)
    return limits.after(loop.time() - started)


async def within(work: Awaitable[T], limits: Deadlines, waits: Callable[[], Awaitable[bool]]) -> T:
    """Return the result of `work`, a request's first output. Cancel the work when a deadline passes.

    Raises Unavailable if the request waits in the queue then, and GatewayTimeout if it is computed.
    """
    loop = asyncio.get_running_loop()
    started, task = loop.time(), asyncio.ensure_future(work)
    named = (("queue", limits.queue), ("first token", limits.first_token), ("request", limits.total))
    try:
        for seconds, name in sorted((seconds, name) for name, seconds in named if seconds is not None):
            await asyncio.wait({task}, timeout=max(started + seconds - loop.time(), 0.0))
            if task.done():
                break
            in_queue = await waits()
            if not task.done() and (in_queue or name != "queue"):
                raise _expired(name, in_queue)
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _expired(name: str, in_queue: bool) -> ApiError:
    code = {"queue": "queue_timeout", "first token": "first_token_timeout", "request": "timeout"}[name]
    if in_queue:
        what = {"queue": " to wait in the queue", "first token": " for its first token", "request": ""}[name]
        message = f"The request's time{what} has passed, and it was not begun."
        return Unavailable(message, code=code, retry_after=None)
    what = "its first token" if name == "first token" else "it"
    return GatewayTimeout(f"The time that the request has for {what} has passed without a token.", code=code)
