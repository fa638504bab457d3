"""Manage the KV cache blocks of every request: match prefixes, allocate, publish and free.

The model's layers form groups whose layers use the same block list. A block holds the cache entries of `block_size`
consecutive tokens for the layers of one group (`worker.messages.CacheGroup`); it is a page of the pool that all groups
share. The kind of a group decides which of its blocks a request holds (`groups/`); this file is about all groups of a
request. A *full* block whose tokens are known has a hash (`hashes.py`); equal hashes mean equal contents. Such a block
is *published* as soon as it is scheduled: steps run in order, and a layer writes all keys and values of a step before
it attends, so even a request in the same step may read it. If that step fails, the scheduler recomputes every request
that read the block (`engine/dependents.py`).

A prefix cache hit is the longest prefix that is cached in every group. Checkpoints are sparse (`checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.kv.checkpoints import Checkpoints
from quire.engine.kv.groups.base import GroupBlocks, Shared
from quire.engine.kv.groups.kinds import KINDS
from quire.engine.kv.hashes import BlockHashes
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.kv.pool import BlockPool
from quire.engine.kv.retention import Retention
from quire.engine.request import Request
from quire.worker.messages import CacheGroup, most_blocks

_BELOW = -1  # in place of a block's id: in a lower tier


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a request: its number of blocks and, per group, the block ids to hold (NULL_BLOCK
    for blocks that no later token attends to).
    """

    num_blocks: int = 0
    block_ids: list[list[int]] = field(default_factory=list)

    @property
    def held(self) -> list[int]:
        """Return the block ids of all groups, without NULL_BLOCK."""
        return [block_id for ids in self.block_ids for block_id in ids if block_id != NULL_BLOCK]


class KVCacheManager:
    """The only writer of the block fields of requests.

    In addition to `num_blocks` blocks there are `num_states` pages for the groups of kind "state", at least two per
    running request. `chunk` is the maximum number of tokens of one request that a step computes. With `whole_images`,
    tokens of an image attend to each other in both directions, so that no prefix hit ends inside one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
        chunk: int = 2048,
        whole_images: bool = False,
        num_states: int = 0,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = tuple(groups)
        self.chunk = chunk
        self.whole_images = whole_images
        self.pool = BlockPool(num_blocks, num_states)
        self.hashes = BlockHashes(block_size, per_group=not enable_prefix_caching)
        self.retention = Retention(self.pool)
        kinds = [KINDS[group.kind] for group in self.groups]
        tags = [bytes([g]) for g, kind in enumerate(kinds) if kind.holds_states and enable_prefix_caching]
        self._has_full = any(kind.needs_all for kind in kinds)
        self.has_states = any(kind.holds_states for kind in kinds)
        self.checkpoints = Checkpoints(self.pool, block_size, tags, self._has_full)
        shared = Shared(self.pool, self.checkpoints, block_size, chunk)
        self.by_group: list[GroupBlocks] = [kind(g, self.groups[g], shared) for g, kind in enumerate(kinds)]
        self._needs_all = all(kind.needs_all for kind in kinds)
        self._is_plain = [kind.has_room for kind in kinds] == [GroupBlocks.has_room]
        # groups that need all blocks first: they end at the first missing block, which bounds the lookups in the others
        self._lookup_order = sorted(self.by_group, key=lambda group: not group.needs_all)
        self._shares_outputs = all(group.shares_outputs for group in self.groups)

    @property
    def usage(self) -> float:
        """Return the fraction of blocks or of state pages that requests hold, whichever is larger, 0 to 1."""
        return self.pool.usage

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds at once, states aside."""
        return most_blocks(self.groups, num_tokens, self.block_size, self.chunk)

    def start_step(self) -> None:
        """Publish the state checkpoints of the previous step. Call this before scheduling a step.

        A request may read keys and values in the step that writes them, but not a state.
        """
        self.checkpoints.publish()
        self.retention.expire()

    def forget(self, block_ids: Sequence[int]) -> None:
        """Unpublish these blocks, so that no later request finds them."""
        self.checkpoints.forget(block_ids)
        self.pool.forget(list(block_ids))

    # ---- prefix hits

    def match(self, request: Request) -> Match:
        """Return the longest cached prefix on which all groups agree. It excludes at least the last token, whose logits
        must be computed.
        """
        if not request.reads_cache:
            return Match()
        num_full = (request.num_tokens - 1) // self.block_size
        self.hashes.extend(request, num_full)
        hashes = request.block_hashes[:num_full]
        found: list[list[int]] = [[] for _ in self.by_group]
        for group in self._lookup_order:
            found[group.g] = group.find(hashes)
            if group.needs_all:
                hashes = hashes[: len(found[group.g])]
        num_blocks = self._agreed(request, found, len(hashes))
        if self.has_states:
            shared = self.checkpoints.num_shared(hashes, len(hashes))
            request.junction = shared * self.block_size if shared < num_full else 0
        if not num_blocks:
            return Match()
        return Match(num_blocks, [group.hold(ids, num_blocks) for group, ids in zip(self.by_group, found)])

    def _agreed(self, request: Request, found: list[list[int]], longest: int) -> int:
        """Return the largest number of blocks, at most `longest`, from which every group can continue. Groups that need
        all blocks have the first `longest`.
        """
        cut = self._cut_images(request, longest) if self.whole_images else set()
        if self._needs_all and not cut:
            return longest
        fits = [n not in cut for n in range(longest + 1)]
        for group, ids in zip(self.by_group, found):
            if not group.needs_all:
                fits = [a and b for a, b in zip(fits, group.fits(ids, longest))]
        if not self._has_full:  # a chunk's first token reads no block, but tokens that no group has cached are no hit
            fits[1:] = [a and NULL_BLOCK not in ids for a, *ids in zip(fits[1:], *found)]
        return max(n for n in range(longest + 1) if fits[n])

    def _cut_images(self, request: Request, longest: int) -> set[int]:
        """Return the prefix lengths in blocks, at most `longest`, that end inside an image."""
        cut: set[int] = set()
        for item in request.media:
            end = min(self.num_blocks(item.offset + item.length), longest + 1)
            cut.update(range(item.offset // self.block_size + 1, end))
        return cut

    def to_fetch(self, request: Request, lookup: Callable[[list[bytes]], list[int]]) -> tuple[list[bytes], int]:
        """Return (keys of blocks in lower tiers that would extend the request's cached prefix, number of their tokens).
        `lookup` finds them: it returns a number per key, 0 for a missing one.
        """
        num_full = (request.num_tokens - 1) // self.block_size
        if not request.reads_cache or not num_full:
            return [], 0
        before = self.match(request).num_blocks
        keys = [[group.tag + one for one in request.block_hashes[:num_full]] for group in self.by_group]
        found = [[self.pool.find(key) or NULL_BLOCK for key in mine] for mine in keys]
        missing = [(g, i) for g, ids in enumerate(found) for i, block_id in enumerate(ids) if block_id == NULL_BLOCK]
        for (g, i), tier in zip(missing, lookup([keys[g][i] for g, i in missing])):
            found[g][i] = _BELOW if tier else NULL_BLOCK
        runs = [
            ids.index(NULL_BLOCK) if NULL_BLOCK in ids else num_full
            for group, ids in zip(self.by_group, found)
            if group.needs_all
        ]
        num_blocks = self._agreed(request, found, min(runs, default=num_full))
        if num_blocks <= before:
            return [], 0
        wanted = [
            keys[group.g][i]
            for group in self.by_group
            for i in range(group.first_read(num_blocks), num_blocks)
            if found[group.g][i] == _BELOW
        ]
        return wanted, (num_blocks - before) * self.block_size

    def allocate_for(self, keys: list[bytes]) -> dict[bytes, int]:
        """Take free blocks and pages for the contents of these keys. The caller has checked that they are free."""
        states = sum(map(self.is_state_key, keys))
        blocks, pages = self.pool.take(len(keys) - states), self.pool.take(states, True)
        self.checkpoints.forget(pages)
        return {key: pages.pop() if self.is_state_key(key) else blocks.pop() for key in keys}

    def publish_filled(self, request: Request, blocks: dict[bytes, int]) -> None:
        """Publish blocks of a request's prefix by key, whose contents did not come from a step."""
        self.hashes.extend(request, (request.num_tokens - 1) // self.block_size)
        places = {one: i for i, one in enumerate(request.block_hashes)}
        for key, block_id in blocks.items():
            self.pool.publish(block_id, key, request, places.get(key[1:]))

    def cached_blocks(self, request: Request, num_blocks: int) -> list[tuple[int, bytes]]:
        """Return the (block, key)s of all groups in the first `num_blocks` blocks of a request that was matched: also
        those from which only a shorter prefix could continue.
        """
        keys = [group.tag + one for group in self.by_group for one in request.block_hashes[:num_blocks]]
        return [(block_id, key) for key in keys if (block_id := self.pool.find(key)) is not None]

    def is_state_key(self, key: bytes) -> bool:
        """Return whether a block's key, its group's tag and its hash, is that of a state."""
        return self.by_group[key[0]].holds_states

    @property
    def has_states_for_one_more(self) -> bool:
        """Return whether enough state pages are free for one more request."""
        return not self.has_states or self.pool.num_free_states >= 2

    def awaits_checkpoint(self, request: Request, match: Match) -> bool:
        """Return whether the step being scheduled leaves a checkpoint of a longer prefix of the request than `match`:
        from the next step on the request can resume there instead of computing the same tokens.
        """
        if not request.reads_cache:
            return False
        last = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        return self.checkpoints.awaits(request.block_hashes[match.num_blocks : last])

    def num_missing(self, request: Request, match: Match) -> int:
        """Return the number of free blocks that a request without blocks would use until all its known tokens are
        computed, states aside.
        """
        held = [block_id for block_id in match.held if not self.pool.is_state(block_id)]
        return max(self.most_blocks(request.num_tokens) - len(held), 0) + self.pool.num_free_among(held)

    def attach(self, request: Request, match: Match) -> None:
        """Give the matched blocks to a request that holds no blocks."""
        assert not any(request.block_ids)
        request.block_ids, request.num_given_back = [[] for _ in self.by_group], [0] * len(self.by_group)
        for group, ids in zip(self.by_group, match.block_ids):
            group.attach(request, ids)
        request.num_published = match.num_blocks
        request.num_computed_tokens = match.num_blocks * self.block_size

    def shared_prefix(self, block_ids: list[list[int]], num_computed: int) -> list[int]:
        """Return the blocks that hold the cached prefix of `num_computed` tokens, among those that a request was
        admitted with.
        """
        num_blocks = num_computed // self.block_size
        shared = [group.prefix(ids, num_blocks) for group, ids in zip(self.by_group, block_ids)]
        return [block_id for ids in shared for block_id in ids if block_id != NULL_BLOCK]

    # ---- allocation

    def plan_checkpoints(self, request: Request, position: int, start: int, end: int) -> None:
        """Record that the step being scheduled computes tokens [start, end) of the request at a batch position, drafts
        aside.
        """
        if self.checkpoints.tags and end - start > 1:
            limit = self._num_shareable(request)
            self.hashes.extend(request, min(end, limit) // self.block_size)
            self.checkpoints.plan(request, position, start, end, limit)

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Return whether the request's blocks already hold its first `num_tokens` tokens."""
        if self._is_plain:  # asked of every decoding request in every step
            return len(request.block_ids[0]) * self.block_size >= num_tokens
        return all(group.has_room(request, num_tokens) for group in self.by_group)

    def allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Allocate blocks for the chunk that ends at token `num_tokens`, and release blocks that this chunk does not
        read. Called once per chunk.

        Returns the blocks added per group (for a state group its two pages, if they change), [] if nothing changes, or
        None, without adding any, if too few are free.
        """
        counts, num_blocks, num_states = [], 0, 0
        for group in self.by_group:
            group.release_unread(request)
            counts.append(count := group.num_to_add(request, num_tokens))
            if group.holds_states:
                num_states += count
            else:
                num_blocks += count
        if num_blocks > self.pool.num_free or num_states > self.pool.num_free_states:
            return None
        added = [group.extend(request, count) for group, count in zip(self.by_group, counts)]
        return added if any(added) else []

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds, over all groups, states aside."""
        return sum(group.num_held(request) for group in self.by_group)

    def num_expected(self, request: Request) -> int:
        """Return the number of blocks that a running request still needs for the rest of its prompt, plus one per group
        for outputs.
        """
        return sum([group.num_expected(request) for group in self.by_group])

    # ---- publishing and freeing

    def publish(self, request: Request) -> list[int]:
        """Publish the request's full blocks that are scheduled (up to `num_computed_tokens`) and whose token ids are
        known.

        Returns the newly published blocks.
        """
        first = request.num_published
        num_full = min(request.num_computed_tokens, self._num_shareable(request)) // self.block_size
        if num_full <= first:
            return []
        self.hashes.extend(request, num_full)
        self.checkpoints.observe(request.block_hashes[first:num_full])
        published = []
        for group in self.by_group:
            published += group.publish(request, first, num_full)
        request.num_published = num_full
        return published

    def _num_shareable(self, request: Request) -> int:
        """Return the number of known tokens at the front of a request whose blocks others may read."""
        return request.num_tokens if self._shares_outputs else request.num_prompt_tokens

    def publish_late(self, request: Request) -> list[int]:
        """Publish the block and state that end at `num_computed_tokens`, if their token ids became known since the step
        was scheduled, before the next step changes the state. Returns the newly published blocks.
        """
        end = request.num_computed_tokens
        is_late = self.has_states and end % self.block_size == 0 and end // self.block_size > request.num_published
        return self.publish(request) if is_late and end <= request.num_tokens else []

    def free(self, request: Request, discard: bool = False) -> list[int]:
        """Release the request's blocks and return those that this publishes.

        Released blocks stay in the prefix cache, unless `discard` is set: after an error their contents are unknown.
        """
        published = []
        if discard:
            self.forget([block_id for ids in request.block_ids for block_id in ids if block_id != NULL_BLOCK])
        else:
            published = self.publish(request)  # token ids received since its last step may have completed a block
            self.retention.note(request)
        self.release(request)
        return published

    def release(self, request: Request) -> None:
        """Release the request's blocks without publishing any."""
        for group in self.by_group:
            group.release(request)
        request.block_ids, request.num_given_back = [], []
        request.passing_checkpoint = None
        request.num_published = 0
        request.num_computed_tokens = 0

    def free_key(self, key: str) -> list[bytes] | None:
        """Forget a conversation that clients asked to keep. Returns the keys of its unpublished blocks, of all groups,
        or None if it was not known.
        """
        hashes = self.retention.free(key)
        if hashes is None:
            return None
        keys = [group.tag + one for one in dict.fromkeys(one[1:] for one in hashes) for group in self.by_group]
        for one in keys:
            block_id = self.pool.find(one)
            if block_id is not None and self.pool.is_state(block_id) and not self.pool.is_held(block_id):
                self.pool.forget([block_id])
        return [one for one in keys if self.pool.find(one) is None]

    def reset_prefix_cache(self) -> bool:
        """Unpublish all blocks. Returns False, and does nothing, while requests hold any block."""
        forgotten = self.pool.forget_all()
        if forgotten:
            self.checkpoints.clear()
            self.retention.clear()
        return forgotten
