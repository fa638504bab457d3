"""Reuse of what stands at another position (`--cache-reuse N`, as in llama.cpp): after the cached prefix of a prompt,
runs of at least N tokens that an earlier request of some row has in the cache, in the same order, are copied, and their
keys rotated to their new positions.

    earlier   P P P P d d d B B B B B e C C C C
    prompt    P P P P B B B B B C C C C x x

The values were computed next to other tokens, so that results differ from those of computing: hashes of such blocks are
marked, and no prefix ever matches them. The next request of the conversation copies them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from quire.engine.kv.manager import KVCacheManager, Plan
from quire.engine.kv.slots import Slot, Slots
from quire.engine.request import Request

_WIDTH = array("I").itemsize


class Reuse:
    """`least` is the length of a run."""

    def __init__(self, kv: KVCacheManager, slots: Slots, least: int):
        self.kv, self.slots, self.least = kv, slots, least

    def plan(self, request: Request, start: int, unsettled: set[int]) -> Plan | None:
        """What a waiting request can reuse after the `start` tokens of its cached prefix, if anything. Blocks that are
        `unsettled` are not read.
        """
        end = request.num_tokens - 1  # the last token is computed
        if end - start < self.least or not request.reads_cache or request.media:
            return None
        tokens = array("I", request.token_ids)
        slot = self._like(request, tokens, start)
        if slot is None:
            return None
        blocks = [None if i in unsettled else i for i in self.slots.blocks_of(slot)]
        plan = Plan(start, start)
        # tokens at their old positions, up to the first other one, lead to the first run that moved
        at = self._run(slot.token_ids, start, tokens, start, end, blocks)
        same = at
        if at:
            self._add(plan, start, at, blocks)
        for first, count in self._moved(slot.token_ids, start + at, tokens, plan, end, blocks):
            self._add(plan, first, count, blocks)
            same = max(same, self.least)
        return plan if same >= self.least else None

    def _like(self, request: Request, tokens: array, start: int) -> Slot | None:
        """The slot that begins like the prompt for longest; None if none has its first `start` tokens."""
        best, longest = None, -1
        for slot in self.slots.all():
            if slot.cache_salt != request.cache_salt or slot.adapters != request.adapters or slot.media:
                continue
            if len(slot.token_ids) <= start or slot.token_ids[:start] != tokens[:start]:
                continue
            if (common := _common(slot.token_ids, start, tokens, start, len(tokens))) > longest:
                best, longest = slot, common
        return best

    def _moved(
        self, old: array, first: int, tokens: array, plan: Plan, end: int, blocks: list[int | None]
    ) -> Iterator[tuple[int, int]]:
        """(first index in `old`, number of tokens) of the runs that follow each other in the prompt from `plan.end` on,
        which the caller advances.
        """
        text = old.tobytes()
        while end - plan.end >= self.least:
            wanted = tokens[plan.end : plan.end + self.least].tobytes()
            place = text.find(wanted, first * _WIDTH)
            while place % _WIDTH and place >= 0:
                place = text.find(wanted, place + 1)
            if place < 0:
                return
            first = place // _WIDTH
            count = self._run(old, first, tokens, plan.end, end, blocks)
            if count < self.least:  # its blocks are not cached any more
                first += 1
                continue
            yield first, count
            first += count

    def _run(self, old: array, first: int, tokens: array, at: int, end: int, blocks: list[int | None]) -> int:
        """Number of equal tokens of old[first:] and tokens[at:end] whose blocks are cached."""
        size = self.kv.block_size
        count = _common(old, first, tokens, at, end)
        last = first // size
        while last < len(blocks) and last * size < first + count and blocks[last] is not None:
            last += 1
        return max(min(count, last * size - first), 0)

    def _add(self, plan: Plan, first: int, count: int, blocks: list[int | None]) -> None:
        size = self.kv.block_size
        slots = [blocks[i // size] * size + i % size for i in range(first, first + count)]
        plan.runs.append((slots, plan.end, first - plan.end))
        plan.blocks += [i for i in blocks[first // size : (first + count - 1) // size + 1] if i not in plan.blocks]
        plan.end += count


def _common(a: array, i: int, b: array, j: int, end: int) -> int:
    """Number of equal elements of a[i:] and b[j:end]."""
    low, high = 0, min(len(a) - i, end - j)
    while low < high:  # compares in C
        middle = (low + high + 1) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle - 1
    return max(low, 0)
