"""Requests that fail at random next to others that share their prefixes. The tokens of the other requests do not
change, nor those of requests that read the cache later.

The device computes from its cache: each slot holds a hash of the token and of the previous slot, read through the block
table, and the last slot determines the next token. So a request that reads a block that was never filled, or filled
wrongly, gets other tokens.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.messages import SamplingParams
from quire.worker.messages import StepOutput, TokenLogprobs
from tests.helpers.engine.fake_executor import FakeExecutor, FakeOptions, expected_tokens, extend, next_token
from tests.helpers.engine.harness import CLIENT, VOCAB, Engine, Idle, assert_invariants, fake_config

MAX_MODEL_LEN = 64
EOS_CHANCE = 0.03
REJECTED, NOT_FINITE, OUT_OF_MEMORY = "injected: rejected", "injected: not finite", "injected: out of memory"


class FaultyDevice(FakeExecutor):
    """Rejects new requests (and computes them with other tokens), reports logits that are not finite, or runs out of
    memory during a step, each with probability `rate`.
    """

    def __init__(self, config, groups: str = "full", rng: random.Random | None = None, rate: float = 0.0):
        super().__init__(config, FakeOptions(groups=groups))
        self.rng, self.rate = rng, rate
        self.rejected: set[int] = set()  # rows of rejected requests
        self.num_faults = 0
        self.tables: dict[int, SimpleNamespace] = {}
        num_slots = (self.ready.num_blocks + self.ready.num_states) * self.ready.block_size
        self.slots = [1 + i for i in range(num_slots)]  # initial contents belong to no request

    def fault(self) -> bool:
        hit = self.rng is not None and self.rng.random() < self.rate
        self.num_faults += hit
        return hit

    def execute(self, step):
        self._check_shape(step)
        for new in step.new:
            self.rejected.discard(new.row)
            tokens = list(new.token_ids)
            if self.fault():
                self.rejected.add(new.row)
                tokens = [0] * len(tokens)
            self.tables[new.row] = SimpleNamespace(
                tokens=tokens,
                blocks=[list(ids) for ids in new.block_ids],
                num_prompt=new.num_prompt_tokens,
                sampling=new.sampling,
            )
        for row, blocks in zip(step.rows, step.new_blocks):
            for group, ids, added in zip(self.ready.groups, self.tables[row].blocks, blocks):
                ids[:] = (added or ids) if group.kind == "state" else ids + added
        memory_ends_at = self.rng.randrange(len(step.rows)) if self.fault() else len(step.rows)
        token_ids, prompt_logprobs, errors = [], {}, {}
        for i, row in enumerate(step.rows):
            token = None
            if i >= memory_ends_at:
                errors[i] = OUT_OF_MEMORY
            else:
                token = self.run(step, i, self.tables[row], prompt_logprobs)
                if row in self.rejected:
                    errors[i] = REJECTED
                elif i in step.samples and self.fault():
                    errors[i] = NOT_FINITE
            if i in step.samples:
                token_ids.append([] if i in errors else [token])
        output = StepOutput(step.step, token_ids, None, prompt_logprobs or None, errors or None)
        return SimpleNamespace(result=lambda: output)

    def run(self, step, i, table, prompt_logprobs):
        start, end = step.num_computed[i], step.num_computed[i] + step.num_scheduled[i]
        table.tokens += [0] * (end - len(table.tokens))  # samples of a failed step are missing
        states = [self._state_before(table, g, start) for g in range(len(self.ready.groups))]
        entries = []
        for position in range(start, end):
            states = [extend(state, table.tokens[position]) for state in states]
            for g, state in enumerate(states):
                for count, page in step.checkpoints.get(i, []) if self.ready.groups[g].kind == "state" else []:
                    if position == start + count - 1:
                        self.slots[page * self.ready.block_size] = state
                if (slot := self._slot_of(table, g, position, end)) is not None:
                    self.slots[slot] = state
            # a group that read other contents changes the token
            state = states[0] if len(set(states)) == 1 else hash(tuple(states))
            if position + 1 < table.num_prompt:
                entries.append(TokenLogprobs([table.tokens[position + 1]], [logprob(state)], 1))
        if table.sampling.prompt_logprobs is not None and entries:
            prompt_logprobs[i] = entries
        if i not in step.samples:
            return None
        token = next_token(state, table.sampling, end - table.num_prompt, VOCAB, EOS_CHANCE)
        table.tokens.append(token)
        return token

    def _state_before(self, table, g: int, start: int) -> int:
        """What group g knows of the tokens before `start`: from the state's page that is read, or from the slot of the
        last one.
        """
        if not start:
            return 0
        group = self.ready.groups[g]
        if group.kind == "state":
            return self.slots[table.blocks[g][0] * self.ready.block_size]
        if group.kind == "chunk" and start % group.window == 0:  # reads nothing; the first group is full
            return self._state_before(table, 0, start)
        return self.slots[self._slot_of(table, g, start - 1, start)]

    def _slot_of(self, table, g: int, position: int, end: int) -> int | None:
        """Where group g writes at `position`; a state is written once, at the end of the chunk."""
        if self.ready.groups[g].kind == "state":
            return table.blocks[g][1] * self.ready.block_size if position == end - 1 else None
        block, offset = divmod(position, self.ready.block_size)
        return table.blocks[g][block] * self.ready.block_size + offset


def logprob(state: int) -> float:
    return -(state % 1009) / 100


def expected_prompt_logprobs(prompt: list[int]) -> list[float]:
    state, values = 0, []
    for token in prompt[:-1]:
        state = extend(state, token)
        values.append(logprob(state))
    return values


@st.composite
def crowds(draw):
    """Generate requests as (turn of arrival, prompt, sampling, turn of the abort or None), most of them with one of two
    prefixes.
    """
    stems = draw(st.lists(st.lists(st.integers(1, 5), min_size=6, max_size=30), min_size=1, max_size=2))
    requests = []
    for _ in range(draw(st.integers(2, 10))):
        prompt = (draw(st.sampled_from(stems)) + draw(st.lists(st.integers(1, VOCAB - 1), max_size=12)))[
            : MAX_MODEL_LEN - 1
        ]
        if draw(st.integers(0, 19)) == 0:
            prompt.append(VOCAB)  # rejected by the scheduler
        sampling = SamplingParams(
            max_tokens=draw(st.sampled_from([0, 1, 4, 9, 20])),
            seed=draw(st.integers(0, 1)),
            eos_token_ids=[7, 8],
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        requests.append(
            (draw(st.integers(0, 12)), prompt, sampling, draw(st.sampled_from([None, None, None, 3, 6, 12])))
        )
    return requests


engine_settings = st.fixed_dictionaries(
    {
        "pipeline_parallel_size": st.sampled_from([1, 1, 1, 2]),
        "num_gpu_blocks_override": st.sampled_from([36, 60, 200]),
        "block_size": st.sampled_from([2, 4]),
        "max_num_seqs": st.integers(2, 8),
        "max_num_batched_tokens": st.sampled_from([8, 20, 40, 100]),
        "enable_prefix_caching": st.just(True),
    }
)


group_mixes = st.sampled_from(
    [
        "full",
        "full",
        "window:5",
        "full+window:9",
        "full+chunk:6",
        "full+state",
        "window:3+window:20+full",
        "state",
        "state+window:7+full+full",
    ]
)


def start(config, groups: str = "full", **options) -> tuple[Engine, FaultyDevice]:
    device = FaultyDevice(config, groups)
    with mock.patch("quire.engine.core.get_executor", lambda config: device):
        engine = Engine(config)
    for name, value in options.items():  # the first steps, of the warm-up request, have no faults
        setattr(device, name, value)
    return engine, device


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@settings(max_examples=200, deadline=None)
@given(engine_settings, group_mixes, crowds(), st.integers(0, 2**32), st.sampled_from([0.05, 0.15, 0.3]))
def test_a_failing_request_changes_nobody_elses_tokens(depth, configuration, groups, requests, seed, rate):
    configuration["num_gpu_blocks_override"] *= 1 + groups.count("+")
    config = fake_config(max_model_len=str(MAX_MODEL_LEN), steps_in_flight=depth, **configuration)
    engine, device = start(config, groups, rng=random.Random(seed), rate=rate)
    drive(engine, requests)
    for i, (_, prompt, sampling, aborted) in enumerate(requests):
        check(engine.outputs.get((CLIENT, str(i)), []), prompt, sampling, may_end_early=aborted is not None)
    engine.collect()
    device.rate = 0.0
    for i, (_, prompt, *_) in enumerate(requests):  # later readers of the remaining cache, all at once and alone
        tokens = [t for output in engine.outputs.get((CLIENT, str(i)), []) for t in output.new_token_ids]
        conversation = [t for t in prompt if t < VOCAB] + tokens + [3]
        if len(conversation) < MAX_MODEL_LEN:
            engine.add(f"reader-{i}", conversation, max_tokens=3)
            engine.run()
            limit = min(MAX_MODEL_LEN, (configuration["num_gpu_blocks_override"] - 1) * configuration["block_size"])
            assert engine.tokens(f"reader-{i}") == expected_tokens(
                conversation, SamplingParams(max_tokens=3), limit, VOCAB
            )
    engine.assert_at_rest()


def drive(engine, requests):
    todo = sorted(
        [(turn, i, "add") for i, (turn, *_) in enumerate(requests)]
        + [(a, i, "abort") for i, (*_, a) in enumerate(requests) if a is not None]
    )
    turn = 0
    while todo or engine.scheduler.requests or engine.core.in_flight or engine.socket.inbox:
        while todo and todo[0][0] <= turn:
            _, i, what = todo.pop(0)
            if what == "abort":
                engine.abort(str(i))
            else:
                engine.add(
                    str(i), requests[i][1], **{f: getattr(requests[i][2], f) for f in SamplingParams.__struct_fields__}
                )
        turn += 1
        try:
            engine.turn()
        except Idle:
            engine.collect()
        assert_invariants(engine)
        assert turn < 5_000


def check(outputs, prompt, sampling, may_end_early):
    """Check that the outputs are correct so far, and complete unless the request itself failed or was aborted."""
    if max(prompt) >= VOCAB:
        assert may_end_early or [bool(output.error) for output in outputs] == [True]
        return
    tokens = [t for output in outputs for t in output.new_token_ids]
    expected = expected_tokens(prompt, sampling, MAX_MODEL_LEN, VOCAB, EOS_CHANCE)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or []]
    scores = [] if sampling.prompt_logprobs is None else list(zip(prompt[1:], expected_prompt_logprobs(prompt)))
    assert tokens == expected[: len(tokens)]
    assert [(entry.token_ids[0], entry.logprobs[0]) for entry in entries] == scores[: len(entries)]
    assert not any(output.finish_reason for output in outputs[:-1])
    if may_end_early and not (outputs and outputs[-1].finish_reason):
        return
    if outputs[-1].error is None:
        assert tokens == expected and len(entries) == len(scores)
    else:
        assert outputs[-1].error.startswith("injected")
