"""The engine's chores: which of them there are, and when each is due."""

from __future__ import annotations

import json
import math

import pytest

from quire.engine.chores.base import Chore, run_due, seconds_until_due
from quire.engine.chores.jobs import Jobs
from quire.engine.chores.save_hot import SaveHot
from quire.engine.chores.slow_steps import WarnOfSlowSteps
from quire.engine.chores.stats import SendStats
from quire.engine.step import Step
from quire.worker.messages import StepInput
from tests.helpers.engine.harness import Clock, Engine, fake_config

ALWAYS = {"Jobs", "SendStats"}


@pytest.mark.parametrize(
    "settings, chores",
    [
        ({}, set()),
        ({"slow_step_threshold": 1.0}, {"WarnOfSlowSteps"}),
        ({"kv_offload_gib": 0.001}, set()),
        ({"kv_disk": "kv", "kv_disk_gib": 0.001}, {"SaveHot"}),
        ({"kv_disk": "kv", "kv_disk_gib": 0.001, "enable_prefix_caching": False}, set()),
        ({"kv_events_config": "events"}, {"PublishKVEvents"}),
        ({"otlp_traces_endpoint": "http://127.0.0.1:1"}, {"NoteEncoded"}),
    ],
)
def test_a_feature_that_is_off_has_no_chore(tmp_path, settings, chores):
    settings = {"slow_step_threshold": 0.0} | settings
    if "kv_disk" in settings:
        settings["kv_disk"] = str(tmp_path / "kv")
    if "kv_events_config" in settings:
        events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
        settings["kv_events_config"] = json.dumps(events)
    engine = Engine(fake_config(**settings))
    assert {type(chore).__name__ for chore in engine.core.chores} == ALWAYS | chores
    engine.core.stop()


class Every(Chore):
    """Runs every `seconds`, only while the engine is idle or also while it is not."""

    def __init__(self, seconds: float, only_idle: bool):
        self.seconds, self.only_idle, self.next, self.runs = seconds, only_idle, 0.0, []

    def due(self, idle: bool) -> float:
        return self.next if idle or not self.only_idle else math.inf

    def run(self, now: float, idle: bool) -> None:
        self.runs.append(now)
        self.next = now + self.seconds


def test_the_engine_sleeps_until_the_first_chore_is_due(monkeypatch):
    clock, chores = Clock(monkeypatch), [Every(2.0, only_idle=True), Every(5.0, only_idle=False)]
    assert seconds_until_due(chores, idle=True) == 0.0
    for _ in range(5):
        run_due(chores, idle=True)
        clock.wait(seconds_until_due(chores, idle=True))
    assert clock.timeouts == [2.0, 2.0, 1.0, 1.0, 2.0]
    assert [now - 1000 for now in chores[0].runs] == [0, 2, 4, 6] and [now - 1000 for now in chores[1].runs] == [0, 5]
    before = list(chores[0].runs)
    for _ in range(3):
        run_due(chores, idle=False)
        clock.wait(seconds_until_due(chores, idle=False))
    assert chores[0].runs == before and clock.timeouts[-1] == 5.0
    assert seconds_until_due([Chore()], idle=True) is None


def test_statistics_wait_while_requests_run(monkeypatch):
    clock, sent = Clock(monkeypatch), []
    stats = SendStats(lambda: sent.append(clock.now))
    assert stats.due(idle=True) == stats.due(idle=False) == math.inf
    stats.schedule()
    clock.now += 0.1
    stats.schedule()  # it is scheduled already
    assert stats.due(idle=False) == 1000.25 and stats.due(idle=True) <= clock.now
    run_due([stats], idle=False)
    assert not sent
    clock.now += 0.2
    run_due([stats], idle=False)
    assert sent == [clock.now] and stats.due(idle=True) == math.inf


def test_jobs_run_one_after_the_other_and_end_alone(monkeypatch):
    clock, jobs, log = Clock(monkeypatch), Jobs(), []

    def job(name, parts):
        for i in range(parts):
            log.append(f"{name}{i}")
            yield
        if not parts:
            raise OSError("no disk")
        return name

    for name, parts in (("a", 2), ("b", 0), ("c", 1)):
        jobs.add(job(name, parts), lambda value, error: log.append(value or type(error).__name__))
    while jobs:
        run_due([jobs], idle=False)
        clock.wait(seconds_until_due([jobs], idle=False))
    assert log == ["a0", "a1", "a", "OSError", "c0", "c"]
    *pauses, last = clock.timeouts
    assert pauses == [pytest.approx(0.001)] * 5 and last is None


def test_slow_steps_are_warned_of_once_a_minute(monkeypatch, caplog):
    engine, clock = Engine(fake_config()), Clock(monkeypatch)
    warner = WarnOfSlowSteps(2.0, engine.scheduler)

    def step(seconds: float) -> None:
        one = Step(StepInput(1, [], [], [], [], [], []), [])
        one.scheduled = clock.now
        clock.now += seconds
        warner.observe(one)
        run_due([warner], idle=False)

    for seconds in (1.9, 2.0, 3.0, 58.0):
        step(seconds)
    assert [record.message.partition(":")[0] for record in caplog.records if "a step took" in record.message] == [
        "a step took 2.0 s",
        "a step took 58.0 s",
    ]


def test_a_busy_engine_saves_less_often(monkeypatch, tmp_path):
    engine = Engine(fake_config(block_size=4, kv_disk=str(tmp_path / "kv"), kv_disk_gib=0.001))
    saver, saved = engine.chore(SaveHot), []
    clock = Clock(monkeypatch)
    unsaved = dict.fromkeys(range(1, 200), 0)
    monkeypatch.setattr(engine.scheduler.tiers._hot, "unsaved", unsaved)
    results = iter([10, 10, 0, 10])
    monkeypatch.setattr(engine.scheduler.contents, "save", lambda most, **_: saved.append(most) or next(results))
    for idle, pause in ((True, 0.01), (False, 1.0), (False, 5.0), (True, 0.01)):
        run_due([saver], idle)
        assert saver.due(idle) == pytest.approx(min(clock.now + pause, saver._report_due))
        clock.now = saver._next
    assert saved == [64, saver._busy_blocks, saver._busy_blocks, 64]
    unsaved.clear()
    clock.now = saver.due(idle=True)
    reported = []
    saver._report = lambda: reported.append(clock.now)
    run_due([saver], idle=True)
    assert reported == [clock.now] and saver.due(idle=True) == math.inf
