"""The blocks that requests hold in one cache group, by index: the part that all kinds of groups share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.kv.checkpoints import Checkpoints
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.kv.pool import BlockPool
from quire.engine.request import Request
from quire.worker.messages import CacheGroup


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that the groups of a manager share. `chunk` is the maximum number of tokens of a request in a step."""

    pool: BlockPool
    checkpoints: Checkpoints
    block_size: int
    chunk: int


class GroupBlocks:
    """The only writer of `request.block_ids[g]` and `request.num_given_back[g]`.

    A kind of group is a subclass, in a file of its own and in the table `kinds.py`. `first_read` says which blocks a
    request reads after a prefix hit; the other methods here are those of a group that holds a block per `block_size`
    tokens until the request ends.
    """

    needs_all: ClassVar[bool] = False  # every token attends to all blocks: a hit ends before the first missing one
    holds_states: ClassVar[bool] = False  # its pages are those for states

    def __init__(self, g: int, group: CacheGroup, shared: Shared):
        self.g, self.group, self.shared = g, group, shared
        self.pool, self.block_size = shared.pool, shared.block_size
        self.tag = bytes([g])  # a published block is looked up by its group's tag and its hash

    # ---- prefix hits

    def first_read(self, num_blocks: int) -> int:
        """Return the index of the first block that a request reads after a hit of `num_blocks` blocks."""
        raise NotImplementedError

    def find(self, hashes: list[bytes]) -> list[int]:
        """Return ids of the published blocks, NULL_BLOCK for a missing one. The list may end before the first missing
        block if the group needs all.
        """
        tag, find = self.tag, self.pool.find
        return [find(tag + one) or NULL_BLOCK for one in hashes]

    def fits(self, found: list[int], longest: int) -> list[bool]:
        """Return for each number of blocks, 0 to `longest`, whether a request could continue from a hit of that many of
        the blocks `found`.
        """
        run, fits = 0, [True]  # number of consecutive cached blocks
        for n in range(1, longest + 1):
            run = run + 1 if found[n - 1] != NULL_BLOCK else 0
            fits.append(run >= n - self.first_read(n))
        return fits

    def hold(self, found: list[int], num_blocks: int) -> list[int]:
        """Return the block ids of a request after a hit of `num_blocks` blocks."""
        first = self.first_read(num_blocks)
        return [NULL_BLOCK] * first + found[first:num_blocks]

    def attach(self, request: Request, ids: list[int]) -> None:
        """Give a request the blocks that `hold` returned."""
        held = [block_id for block_id in ids if block_id != NULL_BLOCK]
        self.pool.share(held)
        self.pool.record_hits(held, request.group)
        request.block_ids[self.g] = list(ids)

    def prefix(self, ids: list[int], num_blocks: int) -> list[int]:
        """Return the blocks of a cached prefix of `num_blocks` blocks among those that a request was admitted with."""
        return ids[:num_blocks]

    # ---- allocation

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Return whether the request's blocks already hold its first `num_tokens` tokens."""
        return len(request.block_ids[self.g]) * self.block_size >= num_tokens

    def release_unread(self, request: Request) -> None:
        """Release blocks that no token from `num_computed_tokens` on reads. Steps run in order, so the steps in flight
        read these blocks before they are reused.
        """

    def num_to_add(self, request: Request, num_tokens: int) -> int:
        """Return the number of pages to take for the chunk that ends at token `num_tokens`."""
        return max(-(-num_tokens // self.block_size) - len(request.block_ids[self.g]), 0)

    def extend(self, request: Request, count: int) -> list[int]:
        """Take `count` pages, which are free. Returns the change for the worker's block table, [] if there is none."""
        added = self.pool.take(count)
        request.block_ids[self.g] += added
        return added

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds; pages for states do not count."""
        return len(request.block_ids[self.g]) - request.num_given_back[self.g]

    def num_expected(self, request: Request) -> int:
        """Return the number of blocks that a running request still needs for the rest of its known tokens, plus one for
        outputs. Pages for states do not count: there are enough for all running requests.
        """
        return self.num_to_add(request, request.num_tokens) + 1

    # ---- publishing and freeing

    def publish(self, request: Request, first: int, num_full: int) -> list[int]:
        """Let other requests find the full blocks [first, num_full) of a request. Returns the newly published ones."""
        ids, published = request.block_ids[self.g], []
        for i in range(first, num_full):
            if ids[i] != NULL_BLOCK:
                self.pool.publish(ids[i], self.tag + request.block_hashes[i], request, i)
                published.append(ids[i])
        return published

    def release(self, request: Request) -> None:
        """Release all blocks of a request."""
        self.pool.release([block_id for block_id in request.block_ids[self.g] if block_id != NULL_BLOCK])
