"""Tenants share the engine: counted in steps and tokens, over the real loop and the fake executor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fairness import until_first_token
from quire.engine.budget import Pace
from quire.engine.shares import fair_parts
from tests.helpers.engine.harness import CLIENT, Engine, fake_config


def order_of_first_tokens(engine: Engine) -> list[str]:
    """Runs to the end; the requests in the order in which they had their first token."""
    order: list[str] = []

    def note() -> None:
        order.extend(name for (_, name), got in engine.outputs.items() if name not in order and got[0].new_token_ids)

    engine.run(note)
    return order


def test_sixty_requests_of_one_do_not_delay_four_of_another():
    engine = Engine(fake_config(max_model_len="64", max_num_seqs=4, num_gpu_blocks_override=200))
    for i in range(60):
        engine.add(f"many-{i}", [i, 1, 2], max_tokens=8, ignore_eos=True, tenant="many")
    for _ in range(3):
        engine.turn()
    for i in range(4):
        engine.add(f"few-{i}", [i, 3, 4], max_tokens=8, ignore_eos=True, tenant="few")
    order = order_of_first_tokens(engine)
    places = [order.index(f"few-{i}") for i in range(4)]
    assert places[0] <= 8 and max(places) <= 12, places
    assert [name for name in order if name.startswith("many")] == [f"many-{i}" for i in range(60)]  # among themselves
    engine.assert_at_rest()


def test_a_tenant_without_a_running_request_does_not_wait_until_one_of_another_ends():
    """Neither for a row nor for blocks; the preempted one goes on, and nobody is preempted for a second one."""
    for limits in ({"max_num_seqs": 4}, {"max_num_seqs": 16, "num_gpu_blocks_override": 50, "block_size": 4}):
        engine = Engine(fake_config(**{"max_model_len": "128", "num_gpu_blocks_override": 200, **limits}))
        for i in range(40):
            engine.add(f"many-{i}", [i, 1, 2], max_tokens=60, ignore_eos=True, tenant="many")
        for _ in range(12):
            engine.turn()
        for i in range(2):
            engine.add(f"few-{i}", [i, 3, 4], max_tokens=30, ignore_eos=True, tenant="few")
        engine.turn()
        engine.turn()
        assert engine.outputs[CLIENT, "few-0"]
        engine.run()
        assert all(len(engine.tokens(f"many-{i}")) == 60 for i in range(40))
        engine.assert_at_rest()


def test_one_tenant_is_served_in_order_of_arrival():
    engine = Engine(fake_config(max_model_len="64", max_num_seqs=2, num_gpu_blocks_override=200))
    for i in range(20):
        engine.add(str(i), [i, 1, 2], max_tokens=i % 5 + 1, ignore_eos=True, age=100.0 - i)
    assert order_of_first_tokens(engine) == [str(i) for i in range(20)]


def steps_to_first_token(long_prompts: int, prompt: int) -> int:
    engine = Engine(
        fake_config(
            max_model_len="4096", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=2000, block_size=16
        )
    )
    for i in range(long_prompts):
        engine.add(f"long-{i}", [i, *(j % 900 for j in range(3000))], max_tokens=1, tenant="long")
    for _ in range(5 if long_prompts else 0):
        engine.turn()
    engine.add("short", [7, *(j % 900 for j in range(prompt - 1))], max_tokens=1, tenant="short")
    steps = 0
    while (CLIENT, "short") not in engine.outputs:
        engine.turn()
        steps += 1
    return steps


def test_long_prompts_of_one_do_not_delay_the_first_token_of_another():
    for prompt in (30, 40, 60, 70, 96, 120, 128, 190, 250, 320, 640, 1500):  # steps have 64 tokens
        alone, together = steps_to_first_token(0, prompt), steps_to_first_token(4, prompt)
        assert alone == -(-prompt // 64) and together <= 1.5 * alone, (prompt, alone, together)


def test_short_prompts_do_not_starve_long_ones():
    """Whoever needs least goes first, but only by some steps: over a longer time each has half of them."""
    engine = Engine(
        fake_config(max_model_len="4096", max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=2000)
    )
    engine.scheduler.kv.enable_prefix_caching = False
    for i in range(3):
        engine.add(f"long-{i}", [i, *(j % 900 for j in range(3000))], max_tokens=1, tenant="long")
    for i in range(400):
        engine.add(f"short-{i}", [9, i % 900, *range(60)], max_tokens=1, tenant="short")
    for _ in range(200):
        engine.turn()
    shares = engine.scheduler.shares
    assert abs(shares.used("short") - shares.used("long")) <= 20 * 64
    assert shares.used("short") > 80 * 64 and shares.used("long") > 80 * 64


def test_a_priority_goes_before_a_share():
    engine = Engine(
        fake_config(max_model_len="64", max_num_seqs=1, num_gpu_blocks_override=200, scheduling_policy="priority")
    )
    engine.add("first", [1, 2], max_tokens=4, ignore_eos=True, tenant="a")
    engine.turn()
    for i in range(3):
        engine.add(f"urgent-{i}", [1, i], max_tokens=4, ignore_eos=True, tenant="a", priority=-1)
        engine.add(f"other-{i}", [2, i], max_tokens=4, ignore_eos=True, tenant="b")
    engine.add("line", [3], max_tokens=4, ignore_eos=True, tenant="c", background=True)
    order = order_of_first_tokens(engine)
    assert [name for name in order if name != "first"][:3] == [f"urgent-{i}" for i in range(3)]
    assert order[-1] == "line"


def test_weights():
    engine = Engine(fake_config(max_model_len="64", max_num_seqs=2, num_gpu_blocks_override=200))
    for i in range(80):
        for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
            engine.add(f"{tenant}-{i}", [i, 1, 2], max_tokens=10, ignore_eos=True, tenant=tenant, weight=weight)
    order = order_of_first_tokens(engine)[:80]
    assert 2.5 < sum(name.startswith("heavy") for name in order) / sum(name.startswith("light") for name in order) < 3.5


def test_an_idle_tenant_does_not_make_up_for_its_time():
    engine = Engine(fake_config(max_model_len="64", max_num_seqs=1, num_gpu_blocks_override=200))
    for i in range(30):
        engine.add(f"a-{i}", [i, 1], max_tokens=5, ignore_eos=True, tenant="a")
    for _ in range(60):
        engine.turn()
    for i in range(10):
        engine.add(f"b-{i}", [i, 2], max_tokens=5, ignore_eos=True, tenant="b")
    order = order_of_first_tokens(engine)
    mixed = order[order.index("b-0") : order.index("b-9")]
    assert abs(sum(name.startswith("a") for name in mixed) - sum(name.startswith("b") for name in mixed)) <= 2


work = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=4, max_size=12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(work, st.sampled_from([0.5, 1.0, 4.0])), min_size=2, max_size=4), st.integers(1, 4))
def test_busy_tenants_are_served_by_weight(tenants, rows):
    """While both have waiting requests, what two tenants got per weight differs by what the rows hold at most."""
    engine = Engine(fake_config(max_model_len="64", max_num_seqs=rows, num_gpu_blocks_override=400))
    engine.scheduler.kv.enable_prefix_caching = False
    for t, (requests, weight) in enumerate(tenants):
        for i, (prompt, max_tokens) in enumerate(requests):
            engine.add(
                f"{t}-{i}", [t, i, *range(prompt)], max_tokens=max_tokens, ignore_eos=True, tenant=str(t), weight=weight
            )
    bound = (rows + 1) * 32 / min(weight for _, weight in tenants)

    def check() -> None:
        shares, busy = engine.scheduler.shares, {one.tenant for one in engine.scheduler.waiting}
        used = [shares.used(tenant) for tenant in busy]
        assert not used or max(used) - min(used) <= bound

    engine.run(check)
    engine.assert_at_rest()
    assert not engine.scheduler.shares._num_requests


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 100), min_size=1),
    st.dictionaries(st.just("a") | st.sampled_from("bcd"), st.sampled_from([0.5, 1.0, 3.0])),
    st.integers(1, 200),
)
def test_parts(needs, weights, total):
    weights = dict.fromkeys(needs, 1.0) | {tenant: weights.get(tenant, 1.0) for tenant in needs}
    parts = fair_parts(needs, weights, total)
    assert all(1 <= parts[tenant] <= needs[tenant] for tenant in needs)
    assert sum(parts.values()) <= max(total, len(needs)) + len(needs)
    if sum(needs.values()) >= total:
        assert sum(parts.values()) >= min(total, sum(needs.values())) - len(needs)


@pytest.mark.slow
def test_a_first_token_is_not_late_in_seconds_either():
    """On a device that computes 1,000 tokens a second a full step would take two seconds."""
    for prompt in (200, 1024, 3000):
        (_, alone), (_, together) = (until_first_token(count, prompt, 1e-3, 5e-3) for count in (0, 4))
        assert together <= 1.5 * alone, (prompt, alone, together)


def test_steps_are_full_on_a_fast_device_and_for_one_tenant():
    pace = Pace()
    for tenant in ("a", "b", "a"):
        pace.record_request(tenant)
    assert pace.limit(2048) == 2048, "the speed is unknown"
    pace.record_step(2048, 4, 0.05)
    assert pace.limit(2048) == 2048
    for _ in range(30):
        pace.record_step(2048, 4, 2.0)
        pace.record_step(64, 64, 2.0)  # outputs say nothing about prompts
    assert 96 <= pace.limit(2048) <= 130
    alone = Pace()
    alone.record_request("a")
    alone.record_step(2048, 4, 2.0)
    alone.record_request("a")
    assert alone.limit(2048) == 2048
