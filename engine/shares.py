"""Fair sharing of the engine by tenants: tokens scheduled per weight, and the queue that serves the tenant that had
least.

This is start-time fair queueing, the form of deficit round robin that needs no rounds: every scheduled token is charged
to its tenant, divided by the tenant's weight, and the tenant with the smallest sum is next. A tenant that was idle
starts just below the smallest sum of the busy ones, so that it is next without making up for the time it did not use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from quire.engine.request import Request, by_key

_AHEAD = 0.5  # tokens by which a tenant that arrives goes before one that had as much
LEAD = 16  # steps
_PREFERENCE = 6.6  # makes 1.17 times as long of it: with the step that runs when it comes, at most 1.5
_BESIDE = 4  # in a shortened step, others have one token for so many that end their prompts
_MAX_IDLE = 1024  # tenants without requests whose sum is remembered while others have some


class Shares:
    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have requests."""
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
    """Waiting requests. Lower ranks come first; among equal ones the tenant that used least; of one tenant the first in
    order of service (`Request.key`).
    """

    def __init__(self, shares: Shares):
        self._shares = shares
        self._ranks: dict[tuple[bool, int], dict[str, list[Request]]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in order of service, as if there was one tenant."""
        for rank in sorted(self._ranks):
            yield from merge(*self._ranks[rank].values(), key=by_key)

    @property
    def first(self) -> Request:
        tenants = self.first_of_tenants()
        if len(tenants) == 1:
            return tenants[0]
        return min(tenants, key=lambda one: (self._shares.used(one.tenant), one.key))

    def first_of_tenants(self) -> list[Request]:
        """Return the first request of each tenant, of the lowest rank."""
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
    """Divide `total` tokens by weight among tenants, none more than it needs; the rest of a share is divided among
    the others.
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
    """Return tokens of a step's `budget` for the prompts of each tenant, so that the long prompt of one does not delay
    the first token of another, whose prompt is running or `admitted` next. Empty if there is one tenant.

    The tenant that needs least has `_PREFERENCE` times its weight, and the whole step if its prompts end with it: so of
    two tenants with long prompts the shorter one takes 1.17 times as long as alone, not twice. A tenant that had `lead`
    tokens more than another has no such advantage, so that over a longer time all have what their weights say. A step
    that `is_short`, so that none waits long for it, is not filled up by others after prompts that end with it.
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
        rest = min(rest, needs[least] // _BESIDE)
    return {least: needs[least]} | (fair_parts(others, weights, rest) if rest else dict.fromkeys(others, 0))
