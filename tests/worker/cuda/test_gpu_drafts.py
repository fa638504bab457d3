"""Drafts where steps overlap and are recorded, as on a GPU: tokens are those without drafts.

Without a GPU the CPU's platform says that its steps overlap, so that results are taken after the next launch, and
recorders that run the function again replace CUDA's.
"""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.worker.cpu.device import CpuPlatform
from quire.worker.sampling.speculation.costs import UNKNOWN_SLOPE, Plan, StepCosts
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import build_family
from tests.worker.batch.test_mixed_graphs import engine_with_pieces
from tests.worker.cuda.test_cuda_graph import Recorder
from tests.worker.sampling.test_eagle3 import Twin, eagle_checkpoint
from tests.worker.sampling.test_speculation import FORCED, PERIOD, check_equal, engine_of

SIZES = dict(block_size=4, num_gpu_blocks_override=400, max_num_batched_tokens=64, max_num_seqs=48, max_model_len="200")
TORCH = dict(attention_backend="cpu_paged", dtype="float32")
PROMPTS = [PERIOD * (2 + i % 4) + PERIOD[: i % 5] + [3 + i] * (i % 3) for i in range(10)]
SAMPLING = [
    SamplingParams(
        max_tokens=12 + 2 * i, temperature=0.8 * (i % 2), seed=i, logprobs=1, ignore_eos=True, allowed_token_ids=PERIOD
    )
    for i in range(len(PROMPTS))
]


@pytest.fixture
def overlapping(monkeypatch):
    monkeypatch.setattr(CpuPlatform, "overlaps", True)


class Spy:
    """Counts the replayed steps that verify drafts."""

    def __init__(self, mixed):
        self.mixed, self.num_verifying = mixed, 0

    def __getattr__(self, name):
        return getattr(self.mixed, name)

    def __call__(self, batch):
        hidden = self.mixed(batch)
        self.num_verifying += bool(batch.drafts) and hidden is not None
        return hidden


def check_texts(engine: InProcessEngine, sampling: list[SamplingParams] = SAMPLING) -> int:
    """Tokens and log-probabilities with drafts are those without. Returns the number of accepted drafts."""
    plain = engine.generate(PROMPTS, [msgspec.structs.replace(one, speculation=False) for one in sampling])
    engine.scheduler.contents.reset_prefix_cache()
    engine.scheduler.flush_stats()
    for found, expected in zip(engine.generate(PROMPTS, sampling), plain):
        assert found.error is None and found.token_ids == expected.token_ids
        scores = [[entry.logprobs[0] for entry in result.logprobs] for result in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    return sum(engine.scheduler.flush_stats().accepted_per_position)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_overlap(checkpoint, native_kernels, overlapping, depth):
    engine = engine_of(checkpoint("qwen3"), deterministic=True, dtype="bfloat16", steps_in_flight=depth)
    runner = engine.executor._worker.runner
    seen = []
    settle = runner._settle
    runner._settle = lambda step: (settle(step), seen.extend(one._result is None for one in runner._unsettled))
    assert check_equal(engine) > 20
    assert any(seen) == (depth == 2)  # steps began before the tokens of the one before were known
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_states_of_steps_that_overlap(name, tmp_path, overlapping):
    engine = engine_of(build_family(name, tmp_path), steps_in_flight=2, max_num_seqs=8, **TORCH)
    assert check_texts(engine) > 10
    engine.close()


@pytest.mark.slow
def test_verifying_steps_are_replayed_in_pieces(checkpoint, overlapping):
    engine, recorder = engine_with_pieces(
        checkpoint("qwen3"), speculative_config=FORCED, steps_in_flight=2, **SIZES, **TORCH
    )
    graphs = engine.executor._worker.runner.forward
    graphs.mixed = spy = Spy(graphs.mixed)
    assert check_texts(engine) > 20
    assert spy.num_verifying > 5 and recorder.num_replays > 10
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [False, True])
def test_the_streams_of_recorded_steps_reach_an_eagle_head(pieces, checkpoint, tmp_path, overlapping):
    target, head = checkpoint("qwen3"), tmp_path / "head"
    twin = Twin(target, eagle_checkpoint(head), False)
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    settings = SIZES | TORCH | {"speculative_config": config, "steps_in_flight": 2}
    if pieces:
        engine, recorder = engine_with_pieces(target, **settings)
    else:
        engine = InProcessEngine(target, **settings)
        runner = engine.executor._worker.runner
        recorder = Recorder(runner.model)
        runner.use_graphs(200, recorder)
        runner.forward.forward = recorder.forward
        while runner.work_idle():
            pass
    drafter, seen = engine.executor._worker.runner.speculator.model, []
    make = drafter.draft

    def record(step, counts):
        found = make(step, counts)
        for i, draft in found.items():
            known = step.num_computed[i] + 1
            seen.append((drafter.table.token_table[step.rows[i], :known].tolist(), list(draft)))
        return found

    drafter.draft = record
    check_texts(engine, [msgspec.structs.replace(one, temperature=0.0, allowed_token_ids=None) for one in SAMPLING])
    assert len(seen) > 20 and recorder.num_replays > 10
    for tokens, draft in seen[::4]:
        assert draft == twin.drafts(tokens, len(draft))
    engine.close()


@pytest.mark.slow
def test_costs_are_measured_apart(checkpoint, overlapping):
    """Nothing pays before they are known."""
    config = '{"method": "ngram"}'
    settings = SIZES | {"max_num_seqs": 16, "speculative_config": config}
    engine = InProcessEngine(checkpoint("qwen3"), **settings)
    runner = engine.executor._worker.runner
    costs, sizes = runner.speculator.costs, [1, 2, 3, 4, 6, 8, 12, 16]
    assert Plan(costs, 1).take(0.95, 8) == 0
    while runner.work_idle():
        pass
    assert sorted(runner.measurement.seconds) == sorted(runner.measurement.of_one) == sizes
    assert not np.array_equal(costs.plain, costs.table) and costs.plain[0] == 1
    engine.close()


def test_steps_with_drafts_that_cost_more_than_those_without():
    costs = StepCosts(UNKNOWN_SLOPE)
    plain = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.1}
    costs.measured({size: seconds * 3 for size, seconds in plain.items()}, plain)
    assert Plan(costs, 1).take(0.5, 8) == 0  # two tokens in the time of three steps
    assert Plan(costs, 1).take(0.95, 8) == 8
    assert Plan(costs, 8).take(0.95, 4) == 0
    costs.measured(plain)
    assert Plan(costs, 8).take(0.95, 4) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2", "gemma3"])
@pytest.mark.parametrize("eager", [False, True])
def test_texts_on_a_gpu(name, eager, checkpoint, tmp_path):
    folder = checkpoint(name) if name == "qwen3" else build_family(name, tmp_path)
    engine = InProcessEngine(
        folder, device="cuda", dtype="float32", speculative_config=FORCED, enforce_eager=eager, **SIZES
    )
    while engine.executor.workers.work_idle():
        pass
    assert check_texts(engine) > 10
    engine.close()
