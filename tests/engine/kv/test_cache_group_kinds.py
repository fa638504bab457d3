"""Kinds of cache groups: which blocks a request of each holds, and that a new kind is one class and its name."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.kv.groups.base import GroupBlocks
from quire.engine.kv.groups.kinds import KINDS
from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.request import Request
from quire.worker.messages import CacheGroup, most_blocks
from tests.engine.kv.test_kv_cache import request
from tests.engine.test_scheduler_properties import MAX_MODEL_LEN, check_outputs, drive, engine_settings, workload
from tests.helpers.engine.harness import CLIENT, Engine, FakeOptions, fake_config

SIZE = 2


class SinkBlocks(GroupBlocks):
    """Attention sinks: tokens attend to the first block and to the last `window` tokens. Holds these blocks."""

    def first_read(self, num_blocks: int) -> int:
        return self.group.first_block(num_blocks * self.block_size, self.block_size)

    def fits(self, found: list[int], longest: int) -> list[bool]:
        return [fits and (not n or found[0] != NULL_BLOCK) for n, fits in enumerate(super().fits(found, longest))]

    def hold(self, found: list[int], num_blocks: int) -> list[int]:
        return found[:1] + super().hold(found, num_blocks)[1:]

    def release_unread(self, request: Request) -> None:
        ids = request.block_ids[self.g]
        first = min(self.group.first_block(request.num_computed_tokens, self.block_size), len(ids))
        self.pool.release([block_id for block_id in ids[1:first] if block_id != NULL_BLOCK])
        ids[1:first] = [NULL_BLOCK] * (len(ids[1:first]))

    def num_held(self, request: Request) -> int:
        return sum(block_id != NULL_BLOCK for block_id in request.block_ids[self.g])


class Sinks(CacheGroup, frozen=True, array_like=True):
    """A group of the new kind, as the worker describes it."""

    def first_block(self, position: int, block_size: int) -> int:
        return max(position - self.window + 1, 0) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        return min(-(-num_tokens // block_size), -(-(self.window + chunk) // block_size) + 2)


@pytest.fixture
def sinks():
    with mock.patch.dict(KINDS, sinks=SinkBlocks):
        yield


def compute(kv: KVCacheManager, prompt: list[int], chunk: int = 4) -> Request:
    """Admit a request and compute its prompt in chunks."""
    one = request(prompt, len(prompt))
    kv.attach(one, kv.match(one))
    while one.num_computed_tokens < len(prompt):
        end = min(one.num_computed_tokens + chunk, len(prompt))
        assert kv.allocate(one, end) is not None
        one.num_computed_tokens = end
        kv.publish(one)
    return one


HELD = [  # kind, which blocks of 10 a request of 20 tokens holds before its next token, how many a hit of 8 reads
    (CacheGroup("full"), list(range(10)), 8),
    (CacheGroup("window", 5), [8, 9], 2),
    (CacheGroup("chunk", 8), [8, 9], 0),
    (Sinks("sinks", 5), [0, 8, 9], 3),
]


@pytest.mark.parametrize(("group", "expected", "num_read"), HELD, ids=[group.kind for group, *_ in HELD])
def test_a_request_holds_the_blocks_that_its_next_tokens_read(sinks, group, expected, num_read):
    kv = KVCacheManager(40, SIZE, groups=[group], chunk=4)
    one = compute(kv, list(range(20)))
    kv.allocate(one, 20)  # releases what the next token does not read
    assert [i for i, block_id in enumerate(one.block_ids[0]) if block_id] == expected
    assert kv.num_held(one) == len(expected) <= most_blocks([group], 20, SIZE, 4)
    kv.free(one)
    match = kv.match(request([*range(16), 99, 99]))
    assert match.num_blocks == 8 and len(match.held) == num_read
    assert kv.pool.num_free == kv.pool.num_usable


def test_a_hit_of_the_new_kind_needs_its_sink_and_its_window(sinks):
    prompt = list(range(20))
    kv = KVCacheManager(40, SIZE, groups=[Sinks("sinks", 5)], chunk=4)
    ids = list(compute(kv, prompt[:10]).block_ids[0])
    keys = [kv.pool.hash_of(block_id) for block_id in ids if block_id]
    assert kv.match(request(prompt)).num_blocks == 5
    for lost, longest in ((keys[0], 0), (keys[-1], 4)):
        block_id = kv.pool.find(lost)
        kv.forget([block_id])
        assert kv.match(request(prompt)).num_blocks == longest
        kv.pool.publish(block_id, lost, request(prompt), None)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(engine_settings, st.sampled_from(["", "full", "window", "state"]), workload())
def test_the_engine_serves_a_new_kind(configuration, other, requests):
    """The fake executor checks the window, and this test that each token finds the first block's tokens."""
    groups = [Sinks("sinks", 6), *([CacheGroup(other, 5 if other == "window" else 0)] if other else [])]
    configuration["num_gpu_blocks_override"] *= len(groups)
    with (
        mock.patch.dict(KINDS, sinks=SinkBlocks),
        mock.patch.object(FakeOptions, "cache_groups", lambda _: groups),
        mock.patch.dict("os.environ", {"FAKE_EXECUTOR": "eos_chance=0.05"}),
    ):
        engine = Engine(fake_config(max_model_len=str(MAX_MODEL_LEN), **configuration))
        executor = engine.core.executor
        check = executor._write_and_check

        def checked(step, batch):
            check(step, batch)
            for i, row in enumerate(batch):
                for position in range(min(step.num_computed[i] + 1, executor.ready.block_size)):
                    assert executor._slots[executor._slot(0, row, position)] == (0, row.states[position])

        executor._write_and_check = checked
        drive(engine, requests)
        limit = engine.scheduler.max_model_len
        for i, (_, prompt, sampling, *_, aborted) in enumerate(requests):
            if aborted is None:
                check_outputs(prompt, sampling, engine.outputs[CLIENT, str(i)], limit)
        engine.assert_at_rest()
