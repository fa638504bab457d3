"""Fair sharing of the engine among tenants: scheduled tokens by weight, and the queue that serves the tenant with the
fewest.

This is start-time fair queueing, the form of deficit round robin that needs no rounds: every scheduled token is charged
to its tenant, divided by the tenant's weight, and the tenant with the smallest sum is next. A tenant that was idle
starts just below the smallest sum of the busy ones, so that it is next without making up for the time it did not use.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from quire.engine.request import Request, by_key

_AHEAD = 0.5  # tokens by which an arriving tenant precedes one with an equal sum
LEAD = 16  # full steps: a tenant further ahead loses `_PREFERENCE`
_PREFERENCE = 6.6  # the tenant that needs least takes 1.17 times as long as alone, with the step in flight at most 1.5
_FILLING = 4  # in a short step, others get one token per this many tokens that end prompts
_MAX_IDLE = 1024  # tenants without requests whose sum is remembered while others have some


class Shares:
    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}

    @property
    def num_tenants(self) -> int:
        """Return the number of tenants that have requests."""
        return len(self._num_requests)

    def used(self, tenant: str) -> float:
        return self._used[tenant]

    def enter(self, request: Request) -> None:
        """Record the arrival of a request of the tenant."""
        tenant = request.tenant
        if tenant not in self._num_requests:
            if not self._num_requests or len(self._used) - len(self._num_requests) > _MAX_IDLE:
                self._used = {busy: self._used[busy] for busy in self._num_requests}
            least = min((self._used[busy] for busy in self._num_requests), default=0.0)
            self._used[tenant] = max(self._used.get(tenant, 0.0), least - _AHEAD)
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def leave(self, request: Request) -> None:
        """Record the end of a request of the tenant."""
        left = self._num_requests[request.tenant] - 1
        if left:
            self._num_requests[request.tenant] = left
        else:
            del self._num_requests[request.tenant]

    def charge(self, request: Request, num_tokens: int) -> None:
        self._used[request.tenant] += num_tokens / request.weight

    def charge_one_each(self, requests: list[Request]) -> None:
        """Charge one token of each request."""
        used = self._used
        for request in requests:
            used[request.tenant] += 1 / request.weight


class FairQueue:
    """Waiting requests. Lower ranks come first, then the tenant that used least; requests of one tenant are in order of
    service (`Request.key`).
    """

    def __init__(self, shares: Shares):
        self._shares = shares
        self._ranks: dict[tuple[bool, int], dict[str, list[Request]]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in order of service, as if there were one tenant."""
        for rank in sorted(self._ranks):
            yield from merge(*self._ranks[rank].values(), key=by_key)

    @property
    def first(self) -> Request:
        tenants = self.first_of_tenants()
        if len(tenants) == 1:
            return tenants[0]
        return min(tenants, key=lambda one: (self._shares.used(one.tenant), one.key))

    def foreground_load(self) -> tuple[int, float]:
        """Return (number of foreground requests, seconds since the first of them arrived)."""
        ranks = [tenants for (background, _), tenants in self._ranks.items() if not background]
        number = sum(len(queue) for tenants in ranks for queue in tenants.values())
        return number, time.monotonic() - self.first.arrival if number else 0.0

    def first_of_tenants(self) -> list[Request]:
        """Return each tenant's first request of the lowest rank."""
        return [queue[0] for queue in self._ranks[min(self._ranks)].values()]

    def add(self, request: Request) -> None:
        insort(self._ranks.setdefault(request.rank, {}).setdefault(request.tenant, []), request, key=by_key)
        self._len += 1

    def remove(self, request: Request) -> None:
        tenants = self._ranks[request.rank]
        queue = tenants[request.tenant]
        i = bisect_left(queue, request.key, key=by_key)
        assert queue[i] is request
        del queue[i]
        self._len -= 1
        if not queue:
            del tenants[request.tenant]
            if not tenants:
                del self._ranks[request.rank]


def fair_parts(needs: dict[str, int], weights: dict[str, float], total: int) -> dict[str, int]:
    """Divide `total` tokens by weight among tenants, at most as many as each needs; the rest of a share goes to the
    others.
    """
    parts: dict[str, int] = {}
    rest = sorted(needs, key=lambda tenant: needs[tenant] / weights[tenant])
    weight = sum(weights[tenant] for tenant in rest)
    for tenant in rest:
        parts[tenant] = min(needs[tenant], max(int(total * weights[tenant] / weight), 1))
        total = max(total - parts[tenant], 0)
        weight -= weights[tenant]
    return parts


def parts_of_prompts(
    prefills: list[Request], admitted: Request | None, budget: int, lead: int, shares: Shares, is_short: bool = False
) -> dict[str, int]:
    """Return each tenant's part of a step's `budget` for its prompts, so that one tenant's long prompt does not delay
    the first token of another, whose prompt is running or `admitted` next. Empty if there is one tenant.

    The tenant that needs least has `_PREFERENCE` times its weight, and all that it needs if its prompts end in this
    step: of two tenants with long prompts, the shorter one takes 1.17 times as long as alone, not twice. A tenant that
    had `lead` tokens more than another has no such advantage, so that in the long run weights decide. A step that
    `is_short`, so that arriving requests do not wait long, is not filled up after prompts that end in it.
    """
    needs: dict[str, int] = {}
    weights = {request.tenant: request.weight for request in prefills}
    for request in prefills:
        missing = request.num_tokens + request.num_in_flight - request.num_computed_tokens
        needs[request.tenant] = needs.get(request.tenant, 0) + missing
    if admitted is not None and admitted.tenant not in needs:
        needs[admitted.tenant], weights[admitted.tenant] = admitted.num_tokens, admitted.weight
    if len(needs) < 2 or budget <= 0:
        return {}
    least = min(needs, key=lambda tenant: needs[tenant] / weights[tenant])
    others = {tenant: need for tenant, need in needs.items() if tenant != least}
    if shares.used(least) - min(map(shares.used, others)) > lead:
        return fair_parts(needs, weights, budget)
    if needs[least] > budget:
        return fair_parts(needs, weights | {least: _PREFERENCE * weights[least]}, budget)
    rest = budget - needs[least]
    if is_short:
        rest = min(rest, needs[least] // _FILLING)
    return {least: needs[least]} | (fair_parts(others, weights, rest) if rest else dict.fromkeys(others, 0))
