"""Decide whether a request fits into the rows, adapter slots and KV cache blocks, and which others it may preempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from quire.engine.kv.manager import KVCacheManager, Match
from quire.engine.request import Request, RequestQueue
from quire.engine.shares import FairQueue


class Room:
    """Reads the queue of running requests and the blocks; changes neither."""

    def __init__(self, kv: KVCacheManager, running: RequestQueue, max_running: int, max_loras: int):
        self.kv, self.running, self.max_running, self.max_loras = kv, running, max_running, max_loras

    def reserve(self) -> int:
        """Return the number of free blocks that admission leaves to running requests, so that a new request does not
        take blocks that they need soon, which would cause a preemption.
        """
        return sum(map(self.kv.num_expected, self.running))

    def can_admit(self, request: Request) -> bool:
        """Return whether a row and enough blocks are free to admit a request."""
        return len(self.running) < self.max_running and self._has_slots(request) and self.has_blocks(request)

    def has_blocks(self, request: Request) -> bool:
        """Return whether enough blocks are free to admit a request."""
        return self.kv.num_missing(request, self.kv.match(request)) + self.reserve() <= self.kv.pool.num_free

    def could_admit(self, request: Request, without: Collection[Request]) -> bool:
        """Return whether a request would fit if the running requests `without` were preempted."""
        if request.num_in_flight or not self._has_slots(request, without):
            return False
        obtainable = sum(self.kv.num_held(other) + self.kv.num_expected(other) for other in without)
        return self.kv.num_missing(request, Match()) + self.reserve() <= self.kv.pool.num_free + obtainable

    def victims(self, request: Request, num_tenants: int) -> list[Request]:
        """Return the running requests that a waiting one may preempt, in order of service: those of higher rank, or
        else those of a tenant with more than its share. Empty if preempting all of them would not free enough.
        """
        found = [other for other in self.running if other.rank > request.rank]
        if not found and num_tenants > 1:
            found = self._crowding(request)
        return found if found and self.could_admit(request, found) else []

    def _crowding(self, request: Request) -> list[Request]:
        """Return the requests to preempt for a tenant without running requests: all but the first of the tenant that
        has most.
        """
        counts = Counter(other.tenant for other in self.running)
        if request.background or counts[request.tenant] or not counts:
            return []
        most = max(counts, key=counts.__getitem__)
        return [other for other in self.running if other.tenant == most and other.rank >= request.rank][1:]

    def next_waiting(self, waiting: FairQueue) -> Request | None:
        """Return the first waiting request; while that one waits for an adapter slot, the first request without
        adapters.
        """
        if self._has_slots(first := waiting.first):
            return first
        return next((request for request in waiting if not request.adapters), None)

    def next_admitted(self, waiting: FairQueue, prefills: Sequence[Request]) -> Request | None:
        """Return the first waiting request, if it is of a tenant without `prefills` and can be admitted now."""
        first = waiting.first if waiting else None
        if first is None or first.background or any(request.tenant == first.tenant for request in prefills):
            return None
        return first if self.can_admit(first) else None

    def _has_slots(self, request: Request, without: Collection[Request] = ()) -> bool:
        """Return whether a step may use the adapters of a request in addition to those of the running ones."""
        if not request.adapters:
            return True
        others = (use.key for other in self.running if other not in without for use in other.adapters)
        return len({use.key for use in request.adapters}.union(others)) <= self.max_loras

    def num_draft(self, request: Request, limit: int) -> int:
        """Return the number of drafts of a decoding request to verify, at most `limit`: as many as the worker has, as
        long as one more token fits into the request, and none if free blocks are scarce. With states, a step ends at
        the next block boundary at the latest: the state there is a checkpoint for the conversation's next turn.
        """
        num_tokens = len(request.token_ids)
        num_draft = min(request.num_draft, limit, request.max_total_tokens - num_tokens - 1)
        if self.kv.checkpoints.tags:
            num_draft = min(num_draft, -num_tokens % self.kv.block_size)
        if num_draft <= 0:
            return 0
        if not self.kv.has_room(request, num_tokens + num_draft):
            scarce = len(self.kv.groups) * (len(self.running) + self.kv.num_blocks(num_draft) + 1)
            if self.kv.pool.num_free < scarce:
                return 0
        return num_draft
