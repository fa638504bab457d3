"""Checkpoints of recurrent states: the tokens at which a step leaves one, in addition to the state after its last
token.

A request holds two pages with states: the next step reads one and writes the other, or the same. A chunk of a prompt
also leaves its state at *marks*, block boundaries within it, in pages of their own:

    at the end of a prefix that another request had (`Request.junction`)
    before the user's last message (`Request.turn_start`)
    at its last block boundary, which at the end of a prompt is that before the last token
    sparse: at multiples of CHECKPOINT_TOKENS

A mark takes a free page after all requests of the step have theirs, so that it delays none of them. After the step the
page is free again, but still found. Sparse marks, and ends of chunks within a prompt, are reused before others, and
take no page that is worth more (`eviction.py`).

Outputs leave checkpoints, of which only the newest stays, and one every CHECKPOINT_TOKENS tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.kv.pool import BlockPool
from quire.engine.request import Request

CHECKPOINT_TOKENS = 1024
MAX_SEEN = 1 << 16  # remembered block hashes of a model in which no group keeps all blocks


@dataclass(frozen=True, slots=True)
class _Mark:
    request: Request
    position: int  # in the batch
    num_tokens: int  # of its chunk, before the mark
    block: int  # index of the block that ends at the mark
    key: bytes
    sparse: bool


class Checkpoints:
    """State checkpoints of the groups named by `tags`; `finds_shared`: another group finds shared prefixes."""

    def __init__(self, pool: BlockPool, block_size: int, tags: list[bytes], finds_shared: bool):
        assert len(tags) <= 1, "layers with states form one group"
        self.pool, self.block_size, self.tags, self.finds_shared = pool, block_size, tags, finds_shared
        # state pages that the step being scheduled writes; visible to other requests from the next step on
        self.pending: dict[int, tuple[bytes, Request, int]] = {}  # key, the state's request, index of its last block
        self._marks: list[_Mark] = []  # for the step being scheduled
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def clear(self) -> None:
        self.pending.clear()
        self._marks.clear()
        self._seen.clear()

    def publish(self) -> None:
        """Let other requests find the checkpoints of the step that was scheduled last."""
        for page, (key, request, block) in self.pending.items():
            self.pool.publish(page, key, request, block)
        self.pending.clear()

    def forget(self, pages: Sequence[int]) -> None:
        """Publish none of these pages."""
        for page in pages:
            self.pending.pop(page, None)

    # ---- prefixes that several requests have

    def observe(self, hashes: list[bytes]) -> None:
        """Record that a request computes these blocks."""
        if self.tags and not self.finds_shared:
            self._seen.update(dict.fromkeys(hashes))
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def num_shared(self, hashes: list[bytes], found: int) -> int:
        """Return the number of leading blocks that an earlier request had, too. `found`: leading blocks that are cached
        in the other groups.
        """
        if self.finds_shared:
            return found
        return next((i for i, one in enumerate(hashes) if one not in self._seen), len(hashes))

    # ---- marks

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return where a chunk of tokens [start, end) ends: at its last block boundary, except for the last chunk."""
        boundary = end // self.block_size * self.block_size
        return boundary if self.tags and end < request.num_tokens and boundary > start else end

    def plan(self, request: Request, position: int, start: int, end: int, limit: int) -> list[int]:
        """Record that the step being scheduled computes tokens [start, end); the first `limit` tokens may be
        shared. Returns the block boundaries in it at which to leave a checkpoint, sparse ones last.
        """
        size = self.block_size
        last = min(end - (end == request.num_tokens), limit) // size * size
        first = [*self._places(request)]
        first += [last] if end >= request.num_prompt_tokens else []
        rest = [*range((start // CHECKPOINT_TOKENS + 1) * CHECKPOINT_TOKENS, end, CHECKPOINT_TOKENS), last]
        stops = dict.fromkeys(stop for stop in first if start < stop < end and stop <= limit)
        sparse = dict.fromkeys(stop for stop in rest if start < stop < end and stop <= limit and stop not in stops)
        for stop in (*stops, *sparse):
            block = stop // size - 1
            key = self.tags[0] + request.block_hashes[block]
            if self.pool.find(key) is None and not any(mark.key == key for mark in self._marks):
                self._marks.append(_Mark(request, position, stop - start, block, key, stop in sparse))

    def _places(self, request: Request) -> tuple[int, int]:
        """Return the positions in a prompt whose checkpoints are worth as much as the one at its end."""
        return request.junction, request.turn_start // self.block_size * self.block_size

    def awaits(self, hashes: list[bytes]) -> bool:
        """Return whether the step being scheduled leaves a checkpoint after a block with one of these hashes."""
        awaited = {key for key, _, _ in self.pending.values()} | {mark.key for mark in self._marks}
        return any(tag + one in awaited for tag in self.tags for one in hashes) if awaited else False

    def take(self) -> list[tuple[Request, int, int, int]]:
        """Take pages for the marks of the step, now that its requests have theirs: (request, batch position, number of
        tokens of its chunk before the mark, page), in the order of tokens.
        """
        taken = []
        for mark in sorted(self._marks, key=lambda mark: mark.sparse):
            page = self.pool.allocate_mark(mark.sparse)
            if page is not None:
                self.pending[page] = mark.key, mark.request, mark.block
                taken.append((mark.request, mark.position, mark.num_tokens, page))
        self._marks.clear()
        self.pool.release([page for _, _, _, page in taken])  # no request takes one before the next step
        return sorted(taken, key=lambda one: one[1:3])

    # ---- ends of chunks

    def end_chunk(self, request: Request, page: int, key: bytes, block: int) -> None:
        """Turn the page that the request's last chunk writes into a checkpoint. The previous one after the prompt is
        dropped unless it is at a multiple of CHECKPOINT_TOKENS.
        """
        self.pending[page] = key, request, block
        end = (block + 1) * self.block_size
        if end < request.num_prompt_tokens and end not in self._places(request):
            self.pool.set_sparse(page)
        if end > request.num_prompt_tokens:
            before = request.passing_checkpoint
            if before is not None and self.pool.find(before[1]) == before[0]:
                self.pool.forget([before[0]])
            request.passing_checkpoint = (page, key) if end % CHECKPOINT_TOKENS else None
