"""Work outside the engine in turns by tenant: shares, byte budget, limits, and work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.errors import Unavailable
from quire.server.keys.caller import Caller
from quire.server.turns.fair_queue import Turns


def test_a_tenants_hundred_pieces_delay_anothers_by_one():
    async def main() -> list[str]:
        turns, pool, order = Turns(1), ThreadPoolExecutor(1), []
        many = [asyncio.create_task(turns.run(pool, "many", lambda: order.append("many"))) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.gather(*(turns.run(pool, "few", lambda: order.append("few")) for _ in range(3)))
        await asyncio.gather(*many)
        return order

    order = asyncio.run(main())
    assert len(order) == 103
    assert max(i for i, name in enumerate(order) if name == "few") < 12


@pytest.mark.slow
def test_shares_are_of_time_not_of_pieces():
    def busy(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def main() -> tuple[int, int]:
        turns, pool, done = Turns(1), ThreadPoolExecutor(1), {"heavy": 0, "light": 0}

        async def work(name: str, seconds: float) -> None:
            await turns.run(pool, name, lambda: busy(seconds))
            done[name] += 1

        tasks = [asyncio.create_task(work("heavy", 0.05)) for _ in range(20)]
        tasks += [asyncio.create_task(work("light", 0.005)) for _ in range(40)]
        while done["light"] < 40:
            await asyncio.sleep(0.005)
        heavy = done["heavy"]
        await asyncio.gather(*tasks)
        return heavy, done["heavy"]

    heavy, all_of_them = asyncio.run(main())
    assert heavy <= 8 and all_of_them == 20  # 40 light pieces take as long as 4 heavy ones


def test_a_tenant_holds_its_part_of_the_slots_only():
    async def main() -> None:
        turns, ends, begun = Turns(3, per_tenant=2), asyncio.Event(), []

        async def hold(tenant: str) -> None:
            async with turns.turn(tenant):
                begun.append(tenant)
                await ends.wait()

        pieces = [asyncio.create_task(hold(tenant)) for tenant in "aaaabab"]
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["a", "a", "b"]
        pieces[0].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(begun) == 4
        ends.set()
        await asyncio.gather(*pieces, return_exceptions=True)
        assert sorted(begun) == [*"aaaaa", *"bb"]

    asyncio.run(main())


def test_bytes_are_bounded_and_a_large_piece_is_not_overtaken_for_ever():
    async def main() -> None:
        turns, order = Turns(4, max_bytes=100), []
        most = used = 0

        async def work(tenant: str, num_bytes: int) -> None:
            nonlocal most, used
            async with turns.turn(tenant, num_bytes):
                used += num_bytes
                most = max(most, used)
                order.append(num_bytes)
                await asyncio.sleep(0.001)
                used -= num_bytes

        small = [asyncio.create_task(work("small", 40)) for _ in range(20)]
        await asyncio.sleep(0)
        await work("large", 90)
        assert order.index(90) < 8
        await asyncio.gather(*small, work("alone", 1000))
        assert most == 1000 and sorted(order)[-2] == 90  # alone
        assert turns._num_bytes == 0 and turns._free == 4

    asyncio.run(main())


def test_work_nobody_waits_for_is_dropped_and_its_slot_is_free_again():
    async def main() -> None:
        turns, pool, gate, done = Turns(1), ThreadPoolExecutor(1), threading.Event(), []
        running = asyncio.create_task(turns.run(pool, "a", gate.wait))
        await asyncio.sleep(0.01)
        left = [asyncio.create_task(turns.run(pool, "a", lambda: done.append(1))) for _ in range(50)]
        await asyncio.sleep(0)
        running.cancel()  # its thread cannot be stopped: the slot stays taken
        for task in left:
            task.cancel()
        await asyncio.gather(running, *left, return_exceptions=True)
        later = asyncio.create_task(turns.run(pool, "b", lambda: "later"))
        await asyncio.sleep(0.01)
        assert not later.done()
        gate.set()
        assert await asyncio.wait_for(later, 5) == "later"
        assert not done and turns._free == 1

    asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=40))
@settings(max_examples=60, deadline=None)
def test_slots_come_back_whenever_work_is_cancelled(pieces):
    """Pieces of three tenants, each cancelled after a number of iterations of the loop, or not."""

    async def main() -> None:
        turns, pool = Turns(2, max_bytes=8), ThreadPoolExecutor(2)

        async def hold(tenant: str, num_bytes: int, ticks: int) -> None:
            async with turns.turn(tenant, num_bytes):
                for _ in range(ticks):
                    await asyncio.sleep(0)

        tasks = []
        for tenant, num_bytes, ticks, in_thread in pieces:
            work = turns.run(pool, tenant, lambda: None, num_bytes) if in_thread else hold(tenant, num_bytes, ticks)
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(0)
            if ticks % 3 == 0:
                tasks[len(tasks) // 2].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        for _ in range(200):
            if turns._free == 2:
                break
            await asyncio.sleep(0.005)
        assert (turns._free, turns._num_bytes) == (2, 0)

    asyncio.run(main())


def test_a_turn_that_comes_to_a_task_just_cancelled_goes_to_the_next():
    async def main() -> None:
        turns = Turns(1)
        async with turns.turn("a"):
            first, second = (asyncio.create_task(turns._begin_turn("a", 0)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()  # its future is cancelled now, the task runs later
        await asyncio.wait_for(second, 5)

    asyncio.run(main())


def test_waiting_is_limited_by_tenant():
    async def main() -> None:
        turns = Turns(1, max_waiting=2, what="images")
        async with turns.turn("a"):
            waiting = [asyncio.create_task(turns._begin_turn("a", 0)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="2 images of yours"):
                await turns._begin_turn("a", 0)
            other = asyncio.create_task(turns._begin_turn("b", 0))
            await asyncio.sleep(0)
            assert not other.done()
        for task in (*waiting, other):
            task.cancel()

    asyncio.run(main())


def test_tenants():
    assert Caller("r", "1.2.3.4", owner="k").turn == "k"
    assert Caller("r", "1.2.3.4").turn == "1.2.3.4"
    assert Caller("r", owner="k", background=True).turn == "k/batch"
    assert Caller("r").turn == ""
