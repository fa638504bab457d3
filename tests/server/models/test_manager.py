"""Which models are loaded, with models that only take time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.configs.config import Config
from quire.engine.messages import MemoryPlan
from quire.server.errors import BadRequest, Unavailable
from quire.server.models import manager
from quire.server.models.entry import ModelEntry
from quire.server.models.loaded import FAILED, LOADED, LOADING, UNLOADED, UNLOADING, LoadFailed
from quire.server.models.need import Planned

MIB = 1 << 20


class Slept:
    """A model whose loading takes a few turns of the loop. `fails` counts the loads that fail."""

    def __init__(self, entry, share, on_change, on_stats, take_spare):
        self.entry, self.on_change = entry, on_change
        self.status, self.error, self.need, self.waiters = UNLOADED, "", None, []
        self.num_leases, self.last_used, self.keep_alive, self.leaves_at = 0, 0.0, entry.keep_alive, None
        self.fails, self.num_loads, self.num_cut, self.timer = 0, 0, 0, None
        self.state = SimpleNamespace(idle=asyncio.Event(), ready=None, draining=False)
        self.state.idle.set()

    @property
    def name(self):
        return self.entry.name

    @property
    def is_busy(self):
        return self.num_leases > 0 or not self.state.idle.is_set()

    def _set(self, status):
        self.status = status
        self.on_change(self)

    async def load(self, need, niceness=None):
        self.need = need
        self._set(LOADING)
        self.num_loads += 1
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self._set(UNLOADING)
            await asyncio.sleep(0.001)  # the engine ends
            self.need = None
            self._set(UNLOADED)
            raise
        if self.fails:
            self.fails -= 1
            self.need, self.error = None, "it is broken"
            self._set(FAILED)
            raise LoadFailed(self.error)
        plan = MemoryPlan("fake", 0, 0, need.weights, 0, 0, 0, 0)
        self.state.ready = SimpleNamespace(worker=SimpleNamespace(plan=plan))
        self._set(LOADED)

    async def unload(self):
        self.num_cut += self.num_leases
        self._set(UNLOADING)
        await asyncio.sleep(0.001)
        self.need, self.state.ready = None, None
        self._set(UNLOADED)

    def leave_in(self, seconds, leave):
        self.timer = asyncio.get_running_loop().call_later(seconds, leave)
        self.leaves_at = seconds

    def stay(self):
        if self.timer is not None:
            self.timer.cancel()

    def kill(self):
        """No action."""


def models_of(monkeypatch, sizes: dict[str, int], budget: int, pinned: str = "", keep_alive=-1.0, **settings):
    """Models of so many MiB within a budget in MiB."""
    config = Config.from_flat(models_memory_bytes=budget * MIB, **settings)
    entries = [ModelEntry(name, name, config, (), name in pinned, keep_alive) for name in sizes]
    monkeypatch.setattr(manager, "Model", Slept)
    host = SimpleNamespace(share=None, observe_stats=None, draining=False, models={})
    found = manager.Models(config, entries, host)

    async def plan(name):
        return Planned(weights=sizes[name] * MIB, max_model_len=1)

    waits = asyncio.Event()
    found.spare = SimpleNamespace(prepare=lambda config: None, close=lambda: None)
    found.planner = SimpleNamespace(get=plan, run=waits.wait, close=waits.set, finished=lambda name: None)
    return found


def present(found) -> int:
    return sum(model.need.total for model in found.models.values() if model.need is not None) // MIB


async def use(found, name: str, seconds: float = 0.0) -> None:
    model = found.models[name]
    await found.enter(model)
    try:
        assert model.status == LOADED
        await asyncio.sleep(seconds)
        assert model.status == LOADED
    finally:
        found.leave(model)


def test_the_least_recently_used_one_makes_room(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 4, "c": 4}, budget=9)
        for name in "abac":
            await use(found, name)
        assert [name for name, model in found.models.items() if model.status == LOADED] == ["a", "c"]
        assert present(found) == 8

    asyncio.run(run())


def test_a_pinned_model_stays_and_one_that_is_in_use_is_waited_for(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 4, "c": 4}, budget=8, pinned="a")
        await use(found, "a")
        long, order = asyncio.create_task(use(found, "b", 0.05)), []
        await asyncio.sleep(0.02)

        async def other(name):
            await use(found, name)
            order.append(name)

        # c waits for b's request; b's new one waits for c, so that requests of b cannot keep c waiting forever
        waiting = asyncio.create_task(other("c"))
        await asyncio.sleep(0.01)
        await asyncio.gather(waiting, other("b"), long)
        assert order == ["c", "b"] and found.models["b"].num_loads == 2
        assert found.models["a"].num_loads == 1 and not any(model.num_cut for model in found.models.values())

    asyncio.run(run())


def test_what_cannot_fit_is_refused_with_its_figures(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 40}, budget=9)
        with pytest.raises(BadRequest, match=r"'b' needs 40.0 MiB \(weights 40.0 MiB, .*more than the 9.00 MiB"):
            await use(found, "b")
        await use(found, "a")

    asyncio.run(run())


def test_a_model_that_fails_is_tried_again_later(monkeypatch):
    async def run():
        monkeypatch.setattr(manager, "BACK_OFF", 0.05)
        found = models_of(monkeypatch, {"a": 4, "b": 4}, budget=4)
        found.models["b"].fails = 1
        results = await asyncio.gather(*(use(found, "b") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, Unavailable) and "it is broken" in one.message for one in results)
        with pytest.raises(Unavailable) as refused:
            await use(found, "b")
        assert refused.value.retry_after == 1 and found.models["b"].num_loads == 1
        await use(found, "a")
        await asyncio.sleep(0.06)
        await use(found, "b")

    asyncio.run(run())


def test_it_leaves_after_its_time(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 4}, budget=9, keep_alive=0.02, pinned="b")
        await asyncio.gather(use(found, "a"), use(found, "b"))
        await use(found, "a", 0.03)
        assert found.models["a"].status == LOADED
        await asyncio.sleep(0.05)
        assert [model.status for model in found.models.values()] == [UNLOADED, LOADED]
        await found.enter(found.models["a"], -1.0)
        found.leave(found.models["a"])
        await asyncio.sleep(0.05)
        assert found.models["a"].status == LOADED

    asyncio.run(run())


def test_at_most_so_many(monkeypatch):
    async def run():
        found = models_of(monkeypatch, dict.fromkeys("abc", 1), budget=90, models_max=2)
        await asyncio.gather(*(use(found, name, 0.005) for name in "abcabc"))
        assert sum(model.status == LOADED for model in found.models.values()) == 2

    asyncio.run(run())


def test_unloading_waits_for_requests(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4}, budget=9)
        running = asyncio.create_task(use(found, "a", 0.03))
        await asyncio.sleep(0.01)
        await found.unload_idle(found.models["a"])
        assert running.done() and found.models["a"].status == UNLOADED and not found.models["a"].num_cut

    asyncio.run(run())


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), budget=st.integers(6, 14), most=st.integers(0, 3))
def test_every_request_is_answered_within_the_budget(seed, budget, most):
    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(asyncio.wait_for(_crowd(monkeypatch, seed, budget, most), 60))


async def _crowd(monkeypatch, seed: int, budget: int, most: int) -> None:
    """80 requests for six models; some clients leave, some loads fail, some models are unloaded by hand."""
    draw = random.Random(seed)
    monkeypatch.setattr(manager, "BACK_OFF", 0.001)
    sizes = {name: draw.randint(1, 5) for name in "abcdef"}
    found = models_of(monkeypatch, sizes, budget, keep_alive=draw.choice([-1.0, 0.0, 0.003]), models_max=most)
    for model in found.models.values():
        model.fails = draw.choice([0, 0, 1])
    over, answered = asyncio.Event(), []

    async def watch():
        while not over.is_set():
            assert present(found) <= budget
            await asyncio.sleep(0)

    async def client():
        await asyncio.sleep(draw.random() * 0.05)
        name = draw.choice(list(sizes))
        for _ in range(50):
            try:
                await asyncio.wait_for(use(found, name, draw.random() * 0.004), draw.choice([0.002, 30.0]))
            except Unavailable:
                await asyncio.sleep(0.002)
            except TimeoutError:
                return
            else:
                answered.append(name)
                return

    async def unload():
        await asyncio.sleep(draw.random() * 0.05)
        await found.unload_idle(found.models[draw.choice(list(sizes))])

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(80)), *(unload() for _ in range(3)))
    while found._loads or found._tasks:  # of clients that left
        await asyncio.sleep(0.001)
    over.set()
    await watching
    for model in found.models.values():
        model.stay()
    assert answered and not any(model.num_cut or model.num_leases or model.waiters for model in found.models.values())
    assert not found._giving_way and not found._queue


def test_a_folder_that_is_missing_has_no_bytes_and_is_reported_by_its_loading(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "config.json").write_text("{}")
    assert [manager._file_bytes(str(path)) for path in (tmp_path, tmp_path / "missing")] == [4, 0]


def test_unloading_stops_a_load_that_no_request_waits_for(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 4}, budget=4)
        model = found.models["a"]
        found.begin(model)
        while model.status != LOADING:
            await asyncio.sleep(0)
        assert found.is_present(model)
        await asyncio.wait_for(found.unload_idle(model), 1)
        assert model.status == UNLOADED and not found.is_present(model)
        await asyncio.wait_for(use(found, "a"), 1)  # loads as before

    asyncio.run(run())


def test_unloading_a_model_that_waits_for_room_takes_it_out_of_the_queue(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4, "b": 4}, budget=4)
        long = asyncio.create_task(use(found, "a", 0.05))
        await asyncio.sleep(0.01)
        found.begin(found.models["b"])
        await asyncio.sleep(0.01)
        assert found.is_present(found.models["b"])
        await asyncio.wait_for(found.unload_idle(found.models["b"]), 1)
        assert not long.done() and found.models["b"].num_loads == 0
        await long
        await use(found, "a")  # does not make way for b any more
        assert found.models["a"].num_loads == 1

    asyncio.run(run())


def test_unloading_waits_for_the_requests_that_wait_for_the_load(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4}, budget=4)
        waiting = asyncio.create_task(use(found, "a", 0.02))
        await asyncio.sleep(0)
        await asyncio.wait_for(found.unload_idle(found.models["a"]), 1)
        assert waiting.done() and not waiting.exception()
        assert found.models["a"].status == UNLOADED and found.models["a"].num_cut == 0

    asyncio.run(run())


def test_a_request_during_the_end_of_a_cancelled_load_loads_again(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4}, budget=4)
        model = found.models["a"]
        found.begin(model)
        while model.status != LOADING:
            await asyncio.sleep(0)
        unloading = asyncio.create_task(found.unload_idle(model))
        await asyncio.sleep(0)  # the load is cancelled, and has not ended yet
        await asyncio.wait_for(asyncio.gather(use(found, "a"), unloading), 1)
        assert model.num_loads == 2

    asyncio.run(run())


def test_unloading_ends_when_the_load_fails(monkeypatch):
    async def run():
        found = models_of(monkeypatch, {"a": 4}, budget=4)
        found.models["a"].fails = 1
        waiting = asyncio.create_task(use(found, "a"))
        await asyncio.sleep(0)
        await asyncio.wait_for(found.unload_idle(found.models["a"]), 1)
        with pytest.raises(Unavailable):
            await waiting

    asyncio.run(run())
