"""Turns by tenant for the work that requests cause outside the engine: bodies, templates, tokenizations, images.

A queue in order of arrival lets one tenant's thousand pieces delay everybody's next one. Here the tenant that used the
least time goes first (start-time fair queueing), so that a tenant alone has the whole machine, and n busy tenants get
a share of 1 / n each, whatever their pieces cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from quire.server.errors import Unavailable

T = TypeVar("T")

_QUANTUM = 0.001  # seconds that a piece is charged when it begins, until its cost is known
_MAX_TENANTS = 1024  # whose used time is remembered while they have no work


@dataclass(slots=True)
class _Tenant:
    used: float  # seconds, comparable among tenants: see `_enter`
    waiting: deque[tuple[int, asyncio.Future[None]]]  # (bytes, set when its turn has come)
    num_running: int = 0


class Turns:
    """Runs at most `num_slots` pieces of work at once, which take at most `max_bytes` together; one that takes more
    waits until it is alone. Belongs to one event loop.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        per_tenant: int | None = None,
        max_bytes: int | None = None,
        max_waiting: int | None = None,
        what: str = "",
    ):
        """Create a queue: `per_tenant` bounds the slots that one tenant holds at once, `max_waiting` its waiting
        pieces. `what` names these in the error, in plural.
        """
        self._per_tenant = num_slots if per_tenant is None else per_tenant
        self._free = num_slots
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._max_waiting, self._what = max_waiting, what
        self._tenants: dict[str, _Tenant] = {}
        self._now = 0.0  # `used` of the tenant whose piece began last

    async def run(self, pool: Executor, tenant: str, function: Callable[[], T], num_bytes: int = 0) -> T:
        """Return the result of `function`, run in `pool`, charged with its CPU time. If the caller is cancelled before
        its turn, the work is dropped; later, it keeps its slot until it ends. Raises Unavailable.
        """
        await self._begin_turn(tenant, num_bytes)
        loop = asyncio.get_running_loop()
        cost = 0.0

        def timed() -> T:
            nonlocal cost
            started = time.thread_time()
            try:
                return function()
            finally:
                cost = time.thread_time() - started

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(lambda: self._give_back(tenant, num_bytes, cost))

        try:
            future = pool.submit(timed)
        except RuntimeError:  # the pool is shut down
            self._give_back(tenant, num_bytes, 0.0)
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5) from None
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Hold a slot, charged with the time it is held. Raises Unavailable."""
        await self._begin_turn(tenant, num_bytes)
        started = time.monotonic()
        try:
            yield
        finally:
            self._give_back(tenant, num_bytes, time.monotonic() - started)

    async def _begin_turn(self, tenant: str, num_bytes: int) -> None:
        one = self._enter(tenant)
        if not one.waiting and self._may_begin(one) and self._fits(num_bytes) and not self._others_wait():
            self._begin(one, num_bytes)
            return
        if self._max_waiting is not None and len(one.waiting) >= self._max_waiting:
            raise Unavailable(
                f"{len(one.waiting)} {self._what} of yours wait already, which is the limit.", retry_after=1
            )
        turn = asyncio.get_running_loop().create_future()
        one.waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._give_back(tenant, num_bytes, 0.0)
            else:
                with contextlib.suppress(ValueError):  # `_next` has passed it
                    one.waiting.remove((num_bytes, turn))
                self._next()
            raise

    def _enter(self, tenant: str) -> _Tenant:
        """Return the tenant's state. One that had no work for a while does not make up for the time it did not use."""
        if (one := self._tenants.get(tenant)) is None:
            if len(self._tenants) >= _MAX_TENANTS:
                idle = [
                    name
                    for name, it in self._tenants.items()
                    if not it.waiting and not it.num_running and it.used <= self._now
                ]
                for name in idle:
                    del self._tenants[name]
            one = self._tenants[tenant] = _Tenant(self._now, deque())
        if not one.waiting:
            one.used = max(one.used, self._now)
        return one

    def _may_begin(self, one: _Tenant) -> bool:
        return one.num_running < self._per_tenant

    def _others_wait(self) -> bool:
        return any(one.waiting and self._may_begin(one) for one in self._tenants.values())

    def _fits(self, num_bytes: int) -> bool:
        if not self._free:
            return False
        return self._max_bytes is None or not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes

    def _begin(self, one: _Tenant, num_bytes: int) -> None:
        self._free -= 1
        one.num_running += 1
        self._num_bytes += num_bytes
        self._now = max(self._now, one.used)
        one.used += _QUANTUM

    def _give_back(self, tenant: str, num_bytes: int, seconds: float) -> None:
        self._free += 1
        self._num_bytes -= num_bytes
        one = self._tenants[tenant]  # it stays while it has running pieces
        one.num_running -= 1
        one.used += max(seconds - _QUANTUM, 0.0)
        self._next()

    def _next(self) -> None:
        """Begin the pieces whose turn it is. A large one is not overtaken, or it would wait for ever."""
        while waiting := [one for one in self._tenants.values() if one.waiting and self._may_begin(one)]:
            one = min(waiting, key=lambda one: one.used)
            num_bytes, turn = one.waiting[0]
            if turn.cancelled():  # its task does not know yet
                one.waiting.popleft()
                continue
            if not self._fits(num_bytes):
                return
            one.waiting.popleft()
            self._begin(one, num_bytes)
            turn.set_result(None)
