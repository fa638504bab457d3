"""Prompts beside running requests: the real scheduler over steps whose duration a model of a device says, on a clock
that only they move on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.budget import LEAST_CHUNK, STRETCH, StepBudget, Tempo
from quire.engine.executor.base import get_executor
from quire.engine.messages import AddRequest, SamplingParams
from quire.engine.shares import Shares
from quire.engine.startup import make_scheduler
from quire.worker.messages import StepOutput
from tests.helpers.engine.harness import Clock, fake_config

SIZES = dict(max_model_len="20000", max_num_seqs=256, max_num_batched_tokens=8192, num_gpu_blocks_override=40000)


@dataclass(frozen=True)
class Device:
    """Seconds of a step: reading the weights or computing the tokens, whichever is longer, and reading the caches."""

    weights: float = 0.005
    per_token: float = 22e-6
    per_context: float = 6e-8  # and request

    def seconds(self, step) -> float:
        contexts = sum(computed for computed in step.input.num_computed)
        return max(self.weights, self.per_token * step.num_tokens) + self.per_context * contexts


@dataclass
class Run:
    """The times of each request's tokens."""

    times: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def gaps(self, prefix: str) -> list[float]:
        some = (at for name, at in self.times.items() if name.startswith(prefix))
        return sorted(b - a for at in some for a, b in pairwise(at))

    @property
    def throughput(self) -> float:
        return sum(map(len, self.times.values())) / self.seconds


def simulate(
    device: Device, arrivals: list[tuple[float, str, int, int]], monkeypatch, follows: bool, num_draft: int = 0
) -> Run:
    """Run requests (time, name, tokens of the prompt, outputs); `follows`: on a device that overlaps steps. Those named
    "background" are. The worker has `num_draft` wrong drafts after each token.
    """
    clock = Clock(monkeypatch)
    executor = get_executor(fake_config(**SIZES))
    ready = msgspec.structs.replace(executor.initialize(lambda phase, fraction: None), overlaps=follows)
    scheduler = make_scheduler(fake_config(**SIZES), ready, executor)
    scheduler.kv.enable_prefix_caching = False
    start, run, left = clock.now, Run(), sorted(arrivals)
    while left or scheduler.requests:
        while left and start + left[0][0] <= clock.now:
            _, name, length, outputs = left.pop(0)
            sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
            is_background = name.startswith("background")
            scheduler.add(AddRequest(name, [len(left) % 900] * length, sampling, background=is_background))
        step = scheduler.schedule()
        if step is None:
            clock.now = start + left[0][0]
            continue
        step.scheduled = clock.now
        clock.now += device.seconds(step)
        drafts = dict.fromkeys(step.input.samples, num_draft) if num_draft else None
        answer = StepOutput(step.input.step, [[1] for _ in step.input.samples], num_draft=drafts)
        for outputs in scheduler.update(step, answer).values():
            for output in outputs:
                run.times.setdefault(output.request_id, []).extend([clock.now] * len(output.new_token_ids))
    run.seconds = clock.now - start
    executor.shutdown()
    return run


def loads(num_streams: int, every: float, count: int, outputs: int) -> list[tuple[float, str, int, int]]:
    streams = [(0.0, f"stream {i}", 100, outputs) for i in range(num_streams)]
    prompts = [(0.5 + i * every, f"prompt {i}", 8192, 4) for i in range(count)]
    return streams + prompts


def p99(run: Run) -> float:
    gaps = run.gaps("stream")
    return gaps[int(0.99 * len(gaps))]


@pytest.mark.parametrize("num_streams, every, num_draft", [(64, 0.6, 0), (16, 0.4, 0), (32, 0.6, 3)])
def test_streams_go_on_while_long_prompts_arrive(num_streams, every, num_draft, monkeypatch):
    device, load = Device(), loads(num_streams, every, 8, 500)
    alone = simulate(device, load[:num_streams], monkeypatch, True, num_draft).gaps("stream")
    before = simulate(device, load, monkeypatch, False, num_draft)
    after = simulate(device, load, monkeypatch, True, num_draft)
    usual = statistics.median(alone)
    assert p99(before) > 4 * usual, (p99(before), usual)
    assert p99(after) <= 2 * usual, (p99(after), usual)
    assert after.throughput >= 0.97 * before.throughput, (after.throughput, before.throughput)
    assert all(len(at) == (4 if name.startswith("prompt") else 500) for name, at in after.times.items())


def test_streams_go_on_while_background_requests_wait(monkeypatch):
    """However many, and however long."""
    streams, device = loads(16, 0.4, 8, 500), Device()
    batch = [(0.0, f"background {i}", 300, 100) for i in range(400)]
    usual = statistics.median(simulate(device, streams[:16], monkeypatch, True).gaps("stream"))
    after = simulate(device, streams + batch, monkeypatch, True)
    assert p99(after) <= 2.2 * usual, (p99(after), usual)


def test_drafts_leave_prompts_their_part():
    budget = StepBudget(8192, False, Shares(), follows_decodes=True)
    budget.tempo.record_step(32, 0, 0.005)
    budget.tempo.record_step(32, 1024, 0.02)
    budget.start_step([SimpleNamespace(num_draft=7)] * 32, 32, 0, 0.0)
    assert budget.tokens - 32 * 8 == budget.tempo.limit(32, 8192) < 1024


def test_prompts_are_not_cut_for_background_requests(monkeypatch):
    """Nor are the first tokens of others late because these decode."""
    batch = [(0.0, f"background {i}", 100, 400) for i in range(32)]
    prompts = [(0.5 + i, f"prompt {i}", 8192, 4) for i in range(4)]

    def waits(run: Run) -> list[float]:
        return [run.times[name][0] - at for at, name, *_ in prompts]

    before, after = (waits(simulate(Device(), batch + prompts, monkeypatch, follows)) for follows in (False, True))
    assert max(after) <= 1.1 * max(before), (after, before)


def test_many_requests_at_once_take_as_long_as_before(monkeypatch):
    load = [(0.0, f"request {i}", 100 + 37 * i % 900, 40 + 53 * i % 200) for i in range(120)]
    before, after = (simulate(Device(), load, monkeypatch, follows) for follows in (False, True))
    assert after.throughput >= 0.97 * before.throughput, (after.throughput, before.throughput)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.integers(1, 512), st.integers(1024, 16384)
)
def test_a_step_takes_as_long_as_it_may(base, per_request, per_token, num_requests, most):
    """With any costs that add up, after a few steps."""
    tempo, chunk = Tempo(), most

    def seconds(num_prompt: int) -> float:
        return base + per_request * num_requests + per_token * num_prompt

    assert tempo.limit(num_requests, most) == most  # nothing is known
    for _ in range(40):
        tempo.record_step(num_requests, 0, seconds(0))
        tempo.record_step(num_requests, chunk, seconds(chunk))
        chunk = tempo.limit(num_requests, most)
    assert LEAST_CHUNK <= chunk <= most
    if LEAST_CHUNK < chunk < most:
        assert 0.95 * STRETCH <= seconds(chunk) / seconds(0) <= 1.02 * STRETCH
    assert tempo.limit(0, most) == most
