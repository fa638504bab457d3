"""The block manager alone, against a naive model that stores contents instead of hashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.engine.kv.manager import KVCacheManager, Match
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.kv.pool import PoolObserver
from quire.engine.messages import AddRequest, SamplingParams
from quire.engine.request import Request

BLOCK_SIZE = 2


def request(
    prompt: list[int], sequence: int = 0, cache_salt: str | None = None, group: int | None = None, **sampling
) -> Request:
    message = AddRequest("r", prompt, SamplingParams(**sampling), cache_salt=cache_salt)
    return Request(message, message.choices[0], b"", sequence, sequence if group is None else group, 0.0, 1000, False)


class Told(PoolObserver):
    """All that an observer learns of a pool."""

    def __init__(self):
        self.published_keys: dict[int, bytes] = {}
        self.hot: set[int] = set()
        self.overwritten: list[tuple[int, bool]] = []  # and whether it was hot

    def published(self, page, key, request, i):
        assert page not in self.published_keys and key[1:] == request.block_hashes[i]
        self.published_keys[page] = key

    def became_hot(self, page, used):
        assert page in self.published_keys and page not in self.hot
        self.hot.add(page)

    def taken(self, page, key, hot):
        assert self.published_keys[page] == key and hot == (page in self.hot)
        self.overwritten.append((page, hot))

    def unpublished(self, page, key):
        assert self.published_keys.pop(page) == key
        self.hot.discard(page)

    def unpublished_all(self):
        self.published_keys.clear()
        self.hot.clear()


class BlocksAgainstModel(RuleBasedStateMachine):
    """The model records the contents of each block (salt and all tokens up to its end) and its holders; a match must
    lead to exactly the right contents.
    """

    @initialize(num_blocks=st.integers(3, 14))
    def start(self, num_blocks):
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.told = Told()
        self.kv.pool.observe(self.told)
        self.num_blocks = num_blocks
        self.requests: list[Request] = []
        self.contents: dict[int, tuple] = {}  # of computed full blocks
        self.released: dict[int, int] = {}  # free blocks that hold something -> blocks taken before they were released
        self.hot: set[int] = set()  # blocks that another request than their own found
        self.num_taken = self.num_admitted = 0

    def put_in_use(self, block_ids):
        for block_id in block_ids:
            self.released.pop(block_id, None)

    def next_reused(self, count):
        """The `count` free blocks with contents to take next: the least recently released first, hot ones as if they
        were released one turnover of the pool later.
        """
        cold = [(time, 0, i, block) for i, (block, time) in enumerate(self.released.items()) if block not in self.hot]
        hot = [
            (time + self.num_blocks - 1, 1, i, block)
            for i, (block, time) in enumerate(self.released.items())
            if block in self.hot
        ]
        return {block for *_, block in sorted(cold + hot)[:count]}

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from([None, "s"]))
    def admit(self, prompt, salt):
        new = request(prompt, self.num_admitted, salt)
        self.num_admitted += 1  # a group of its own
        match = self.kv.match(new)
        matched = match.held
        assert len(matched) <= (len(prompt) - 1) // BLOCK_SIZE
        for i, block_id in enumerate(matched):
            assert self.contents[block_id] == (salt, *prompt[: (i + 1) * BLOCK_SIZE])
        following = (salt, *prompt[: (len(matched) + 1) * BLOCK_SIZE])
        if len(following) - 1 < len(prompt):
            assert following not in [self.contents[block_id] for block_id in self.findable()], (
                "a longer match was possible"
            )
        if self.kv.num_missing(new, match) > self.kv.pool.num_free:
            return
        self.kv.attach(new, match)
        self.put_in_use(matched)
        self.hot.update(matched)
        self.grow(new, len(prompt))
        self.requests.append(new)

    def findable(self):
        return set(self.kv.pool.pages.by_key.values())

    def grow(self, req, num_tokens):
        """Allocate and compute up to `num_tokens`; check that the least recently used blocks are taken."""
        free = self.kv.pool.num_free
        count = -(-num_tokens // BLOCK_SIZE) - len(req.block_ids[0])
        added = self.kv.allocate(req, num_tokens)
        if count > free:
            assert added is None and self.kv.pool.num_free == free
            return
        added = added[0] if added else []
        assert len(added) == count and NULL_BLOCK not in added
        assert not set(added) & {b for other in self.requests if other is not req for b in other.block_ids[0]}
        num_blank = free - len(self.released)
        lost = [(block_id, block_id in self.hot) for block_id in added if block_id in self.released]
        assert self.told.overwritten[len(self.told.overwritten) - len(lost) :] == lost
        assert set(added[num_blank:]) == self.next_reused(max(count - num_blank, 0)), "not the least recently used"
        self.num_taken += count
        self.hot -= set(added)
        self.put_in_use(added)
        for block_id in added:
            self.contents.pop(block_id, None)
        req.num_computed_tokens = num_tokens
        for i in range(num_tokens // BLOCK_SIZE):
            self.contents[req.block_ids[0][i]] = (req.cache_salt, *req.token_ids[: (i + 1) * BLOCK_SIZE])
        self.kv.publish(req)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data, token):
        req = data.draw(st.sampled_from(self.requests))
        if req.num_computed_tokens == req.num_tokens:
            req.token_ids.append(token)
        self.grow(req, req.num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), discard=st.booleans())
    def free(self, data, discard):
        req = data.draw(st.sampled_from(self.requests))
        self.requests.remove(req)
        block_ids = req.block_ids[0]
        self.kv.free(req, discard)
        if discard:
            assert not self.findable() & set(block_ids)
        held = {b for other in self.requests for b in other.block_ids[0]}
        self.hot &= self.findable()
        for block_id in reversed(block_ids):
            if block_id not in held and block_id in self.findable():
                self.released[block_id] = self.num_taken

    @rule()
    def reset(self):
        assert self.kv.reset_prefix_cache() == (not self.requests)
        if not self.requests:
            self.released.clear()
            self.hot.clear()
            assert not self.findable()

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "kv"):
            return
        held = [b for req in self.requests for b in req.block_ids[0]]
        assert self.kv.pool.num_free == self.num_blocks - 1 - len(set(held))
        assert [self.kv.pool.pages.num_refs[b] for b in range(self.num_blocks)] == [
            held.count(b) for b in range(self.num_blocks)
        ]
        assert self.told.published_keys == {page: key for key, page in self.kv.pool.pages.by_key.items()}
        assert self.told.hot == self.kv.pool.free_blocks.hot == self.hot & self.findable()
        assert self.kv.usage == pytest.approx(len(set(held)) / (self.num_blocks - 1))


@pytest.mark.slow
def test_blocks_against_a_naive_model():
    run_state_machine_as_test(
        BlocksAgainstModel, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=12), st.integers(1, 3), st.data())
def test_hashes_are_computed_once_and_grow_with_the_request(tokens, block_size, data):
    """The hash chain is the same whether it was extended step by step or at once, and every token before a block
    affects its hash.
    """

    def chain(token_ids, steps, **root):
        req = request(token_ids, **root)
        kv = KVCacheManager(4, block_size)
        for num_full in [*steps, len(token_ids) // block_size]:
            kv.hashes.extend(req, num_full)
        return req.block_hashes

    whole = chain(tokens, [])
    assert chain(tokens, [0, 1]) == whole and len(whole) == len(tokens) // block_size
    changed = data.draw(st.integers(0, len(tokens) - 1))
    other = chain([*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]], [])
    assert [a == b for a, b in zip(whole, other)] == [i < changed // block_size for i in range(len(whole))]
    assert not set(whole) & set(chain(tokens, [], cache_salt="s"))


def test_without_prefix_caching_the_group_is_part_of_every_hash():
    kv = KVCacheManager(20, 2, enable_prefix_caching=False)
    first, choice, stranger = request([1, 2, 3], 1, group=1), request([1, 2, 3], 2, group=1), request([1, 2, 3], 3)
    kv.attach(first, Match())
    kv.allocate(first, 3)
    first.num_computed_tokens = 3
    kv.publish(first)
    assert kv.match(choice).held == first.block_ids[0][:1] and kv.match(stranger).held == []


def test_the_tail_is_evicted_before_the_prefix():
    kv = KVCacheManager(5, 2)
    old = request([1, 2, 3, 4, 5, 6, 7, 8])
    kv.attach(old, Match())
    kv.allocate(old, 8)
    old.num_computed_tokens = 8
    kv.free(old)
    other = request([9, 9, 9, 9])
    kv.attach(other, Match())
    kv.allocate(other, 4)
    assert kv.match(request([1, 2, 3, 4, 5, 6, 7, 8])).num_blocks == 2


def test_an_unknown_token_keeps_its_block_unpublished():
    """At depth 2 a block may be scheduled before the id of its last token is known."""
    kv = KVCacheManager(5, 2)
    req = request([1, 2, 3])
    kv.attach(req, Match())
    kv.allocate(req, 4)
    req.num_computed_tokens, req.num_in_flight = 4, 1
    kv.publish(req)
    assert kv.match(request([1, 2, 3, 7, 0])).num_blocks == 1
    req.token_ids.append(7)
    kv.publish(req)
    assert kv.match(request([1, 2, 3, 7, 0])).num_blocks == 2


def test_releasing_twice_is_our_bug():
    kv = KVCacheManager(5, 2)
    blocks = kv.pool.take(1)
    kv.pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        kv.pool.release(blocks)
