"""Runs work whose cost grows with the request: on the event loop if it is small, else in a thread, so that it does not
delay other requests' tokens. Threads serve tenants in turns (`turns.py`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.server.turns.fair_queue import Turns

T = TypeVar("T")

SMALL = 2048  # bytes of input: at most about 1 ms of work, the cost of a few switches to a thread
PER_TURN = 4 * SMALL  # bytes of small inputs per event loop iteration
LARGE = 2**18  # bytes from which work gets separate threads, so that other work does not wait for it
NUM_THREADS = 2  # for work of each size
# seconds until a thread must release the GIL to the loop; Python's default is 5 ms
SWITCH_INTERVAL = 0.001


@dataclass(slots=True)
class Deferred(Generic[T]):
    """Work that cannot begin before `awaited(tenant)` has ended, which runs on the loop, in turns of the tenant."""

    awaited: Callable[[str], Awaitable[None]]
    then: Callable[[], T]


class Threads:
    """Threads of tasks that take turns. Belongs to one event loop.

    A size is in bytes of request body, or work equivalent to that many bytes.
    """

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="work")
        self._pool_for_large = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="large-work")
        self._turns, self._turns_for_large = Turns(NUM_THREADS), Turns(NUM_THREADS)
        self._spent = 0  # bytes of small inputs in this iteration

    def takes_long(self, size: int) -> bool:
        return size >= SMALL or self._spent + size > PER_TURN

    async def run(self, size: int, function: Callable[[], T], tenant: str) -> T:
        """Return the result of `function`, in the tenant's turn (`Caller.turn`). If the caller is cancelled before the
        work begins, the work is dropped.
        """
        if self.takes_long(size):
            if size >= LARGE:
                return await self._turns_for_large.run(self._pool_for_large, tenant, function)
            return await self._turns.run(self._pool, tenant, function)
        if self._spent == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent += max(size, 1)
        return function()

    def _next_turn(self) -> None:
        self._spent = 0
