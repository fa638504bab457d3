"""The fake executor detects the scheduling mistakes that it should detect."""

from __future__ import annotations

import time

import pytest

from quire.configs.config import Config
from quire.engine.executor.base import get_executor
from quire.engine.messages import SamplingParams
from quire.worker.messages import NewRequest, StepInput
from tests.helpers.engine.fake_executor import FakeExecutor, FakeOptions, expected_tokens
from tests.helpers.engine.harness import VOCAB, fake_config

SAMPLING = SamplingParams(max_tokens=10)


def executor(**options) -> FakeExecutor:
    return FakeExecutor(
        fake_config(
            block_size=2, num_gpu_blocks_override=20, max_model_len="30", max_num_seqs=4, max_num_batched_tokens=20
        ),
        FakeOptions(**options),
    )


def prompt_step(fake: FakeExecutor) -> list[list[int]]:
    step = StepInput(
        1,
        [NewRequest(0, [5, 6, 7], 3, [[1, 2]], SAMPLING), NewRequest(1, [8, 9], 2, [[3]], SAMPLING)],
        [0, 1],
        [0, 0],
        [3, 2],
        [[], []],
        [0, 1],
    )
    return fake.execute(step).result().token_ids


def test_it_generates_the_expected_tokens():
    fake = executor()
    tokens = [row[0] for row in prompt_step(fake)]
    more = fake.execute(StepInput(2, [], [1, 0], [2, 3], [1, 1], [[[4]], []], [0, 1])).result().token_ids
    assert [tokens[0], more[1][0]] == expected_tokens([5, 6, 7], SAMPLING, 30, VOCAB)[:2]
    assert [tokens[1], more[0][0]] == expected_tokens([8, 9], SAMPLING, 30, VOCAB)[:2]


@pytest.mark.parametrize(
    "fault, step",
    [
        ("a row appears twice", StepInput(2, [], [0, 0], [3, 3], [1, 1], [[], []], [0, 1])),
        ("differ in length", StepInput(2, [], [0, 1], [3], [1], [[]], [0])),
        ("a step has 21 tokens", StepInput(2, [], [0], [3], [21], [[]], [])),
        ("a row has no scheduled tokens", StepInput(2, [], [0], [3], [0], [[]], [])),
        ("position 2 has no block", StepInput(2, [], [1], [2], [1], [[]], [0])),
        (
            "written twice",
            StepInput(2, [NewRequest(2, [1, 1], 2, [[2]], SAMPLING)], [0, 2], [3, 0], [1, 2], [[], []], [0, 1]),
        ),
        ("computes up to", StepInput(2, [], [0], [3], [2], [[[5]]], [0])),
        ("samples after", StepInput(2, [], [0], [2], [1], [[]], [0])),
        # the block holds another prefix
        (
            "reads another token",
            StepInput(2, [NewRequest(2, [8, 9, 1], 3, [[1, 9]], SAMPLING)], [2], [2], [1], [[]], [0]),
        ),
        # overwrites a block in use
        (
            "reads another token",
            StepInput(2, [NewRequest(2, [1, 1], 2, [[1]], SAMPLING)], [2, 0], [0, 3], [2, 1], [[], []], [0, 1]),
        ),
        ("is new but does not run", StepInput(2, [NewRequest(2, [1], 1, [[9]], SAMPLING)], [0], [3], [1], [[]], [0])),
        ("block table", StepInput(2, [], [1], [2], [1], [[[0]]], [0])),
    ],
)
def test_it_finds_faulty_steps(fault, step):
    fake = executor()
    prompt_step(fake)
    with pytest.raises(AssertionError, match=fault):
        fake.execute(step)


def test_without_validation_it_only_samples():
    assert prompt_step(executor(validate=False)) == prompt_step(executor())


def test_eos_chance_and_min_tokens():
    sampling = SamplingParams(max_tokens=1000, eos_token_ids=[3], min_tokens=20)
    lengths = [len(expected_tokens([i], sampling, 5000, VOCAB, eos_chance=0.1)) for i in range(200)]
    assert min(lengths) > 20 and 27 < sum(lengths) / len(lengths) < 34


def test_with_a_chance_of_0_no_seed_ends_a_request():
    for seed in range(100):
        sampling = SamplingParams(max_tokens=50, eos_token_ids=[1, 2, VOCAB - 1, 0], seed=seed)
        assert len(expected_tokens([seed], sampling, 5000, VOCAB)) == 50


def test_steps_queue_up_on_the_pretended_device():
    fake, start = executor(step_delay=0.05), time.monotonic()
    step = StepInput(1, [NewRequest(0, [5], 1, [[1]], SAMPLING)], [0], [0], [1], [[]], [0])
    first, second = fake.execute(step), fake.execute(step)
    assert time.monotonic() - start < 0.03
    first.result()
    assert time.monotonic() - start >= 0.05
    second.result()
    assert time.monotonic() - start >= 0.1


def test_options_from_text():
    assert FakeOptions.from_text("step_delay=0.01,eos_chance=0.5,validate=0") == FakeOptions(
        validate=False, eos_chance=0.5, step_delay=0.01
    )
    with pytest.raises(ValueError, match="unknown option speed"):
        FakeOptions.from_text("speed=9")


def test_get_executor():
    assert isinstance(get_executor(fake_config()), FakeExecutor)


@pytest.mark.parametrize(
    "name, message",
    [
        ("mpi", "must be one of uniproc, mp, ray or MODULE:CLASS"),
        ("no.such.module:Executor", "cannot be imported: No module named 'no'"),
        ("quire.engine.step:Executor", "cannot be imported: module 'quire.engine.step' has no attribute 'Executor'"),
    ],
)
def test_an_executor_that_there_is_not(name, message):
    with pytest.raises(ValueError, match=message):
        get_executor(Config.from_flat(distributed_executor_backend=name))
    with pytest.raises(ValueError, match="must be one of"):
        get_executor(fake_config().from_flat(distributed_executor_backend="carrier-pigeon"))
    with pytest.raises(ValueError, match="uniproc"):
        get_executor(fake_config().from_flat(distributed_executor_backend="uniproc", tensor_parallel_size=2))
