"""Drafts on real models: tokens and log-probabilities equal those without, bit for bit, whoever drafts."""

from __future__ import annotations

import json
import random
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.messages import NewRequest, NoRepeatNgram, SamplingParams, StepInput, ThinkingBudget
from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.choice import Speculation
from quire.worker.sampling.speculation.costs import KNOTS, Odds, Plan, StepCosts
from quire.worker.sampling.speculation.drafter import History
from quire.worker.sampling.speculation.earlier import SEGMENT, EarlierTexts, Progress
from quire.worker.sampling.speculation.lookup import MAX_SEARCHED, LookupDrafter, PredictionDrafter, longest_match
from quire.worker.sampling.speculation.speculator import Speculator, accepted
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import build_family
from tests.helpers.models.lora import make_adapter, use

FORCED = '{"method": "auto", "num_speculative_tokens": 5}'
PERIOD = [17, 40, 99, 23, 51, 64, 80]
SAMPLING = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.7, seed=5, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=6, logprobs=1, logprobs_mode="processed_logprobs"),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.2, presence_penalty=0.3, logprobs=0),
    SamplingParams(temperature=0.5, min_p=0.05, seed=8, min_tokens=17, stop_token_ids=list(range(4, 300, 2))),
    SamplingParams(temperature=0.0, no_repeat_ngram=NoRepeatNgram(3, 30), logit_bias={7: 2.0, 9: -1.0}),
    SamplingParams(temperature=0.0, bad_words_ids=[[40, 99], [23], [64, 80, 17]], logprobs=1),
    SamplingParams(temperature=0.8, seed=3, allowed_token_ids=PERIOD, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0.0, thinking=ThinkingBudget(6, True, (5,), (6, 7), (8, 6, 7))),
]


def requests():
    generator = random.Random(0)
    prompts = [PERIOD * 6 + PERIOD[: i % 5] + [generator.randrange(4, 500) for _ in range(i % 3)] for i in range(9)]
    return prompts, [msgspec.structs.replace(one, max_tokens=40) for one in SAMPLING]


class Adversary:
    """Drafts that are right for a while, wrong in the middle, out of the text, or the end-of-sequence token."""

    def __init__(self, texts: list[list[int]], vocab_size: int = 512) -> None:
        self.texts, self.vocab_size, self.random = texts, vocab_size, random.Random(1)

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        text = history.tokens.tolist()
        rest = next((one[len(text) :] for one in self.texts if one[: len(text)] == text), [])[:limit]
        for k in range(len(rest)):
            if self.random.random() < 0.25:
                rest[k] = self.random.choice([0, 1, 2, 23, self.vocab_size - 1])
        return rest[: self.random.randint(0, limit)] or [self.random.randrange(self.vocab_size)]


def check_equal(engine: InProcessEngine, drafters=None) -> int:
    """Returns the number of accepted drafts."""
    prompts, sampling = requests()
    plain = engine.generate(prompts, [msgspec.structs.replace(one, speculation=False) for one in sampling])
    if drafters is not None:
        texts = [prompt + result.token_ids for prompt, result in zip(prompts, plain)]
        engine.executor._worker.runner.speculator.drafters = [drafters(texts)]
    engine.scheduler.flush_stats()
    with_drafts = engine.generate(prompts, sampling)
    for i, (a, b) in enumerate(zip(plain, with_drafts)):
        assert a.error is None and a.token_ids == b.token_ids, i
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), i
        assert a.logprobs == b.logprobs and len(b.logprobs) in (0, len(b.token_ids)), i
        assert a.prompt_logprobs == b.prompt_logprobs
    return sum(engine.scheduler.flush_stats().accepted_per_position)


def engine_of(folder, **settings) -> InProcessEngine:
    return InProcessEngine(
        folder,
        **{
            "max_num_seqs": 16,
            "max_model_len": "256",
            "num_gpu_blocks_override": 200,
            "num_threads": 1,
            "speculative_config": FORCED,
        }
        | settings,
    )


@pytest.fixture(scope="module")
def bfloat16(checkpoint, native_kernels):
    return engine_of(checkpoint("qwen3"), deterministic=True, dtype="bfloat16")


def test_lookup_equals_no_speculation_bit_for_bit(bfloat16):
    assert check_equal(bfloat16) > 20


def test_right_wrong_and_adversarial_drafts_equal_no_speculation(bfloat16):
    drafters = bfloat16.executor._worker.runner.speculator.drafters
    try:
        assert check_equal(bfloat16, Adversary) > 50
        assert check_equal(bfloat16, lambda texts: Wrong()) == 0
    finally:
        bfloat16.executor._worker.runner.speculator.drafters = drafters


class Wrong:
    def propose(self, row: int, history: History, limit: int) -> list[int]:
        return [511] * limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 13, "max_model_len": "128"},
        {"max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 13, "max_model_len": "128", "max_num_batched_tokens": 24, "steps_in_flight": 2},
    ],
)
def test_preemption_chunked_prompts_and_steps_in_flight(checkpoint, native_kernels, settings):
    engine = engine_of(checkpoint("qwen3"), deterministic=True, dtype="bfloat16", **settings)
    assert check_equal(engine) > 5
    engine.executor.shutdown()


def test_quantized_weights(checkpoint, native_kernels):
    engine = engine_of(checkpoint("qwen3"), deterministic=True, quantization="int4")
    assert check_equal(engine) > 20


def test_rows_with_adapters_and_without(checkpoint, tmp_path, native_kernels):
    folder = checkpoint("qwen3")
    adapter = make_adapter(tmp_path / "adapter", folder, 8, seed=1)
    engine = engine_of(folder, deterministic=True, dtype="bfloat16", enable_lora=True)
    prompts, sampling = requests()
    uses = [[use(adapter)] if i % 2 else [] for i in range(len(prompts))]
    plain = engine.generate(
        prompts, [msgspec.structs.replace(one, speculation=False) for one in sampling], adapters=uses
    )
    engine.scheduler.flush_stats()
    drafted = engine.generate(prompts, sampling, adapters=uses)
    assert [(one.token_ids, one.logprobs) for one in drafted] == [(one.token_ids, one.logprobs) for one in plain]
    assert sum(engine.scheduler.flush_stats().accepted_per_position) > 5


def test_choices_of_one_prompt(bfloat16):
    prompt, sampling = PERIOD * 6, SamplingParams(temperature=0.8, seed=40, max_tokens=30, logprobs=1)
    plain = bfloat16.generate([prompt], msgspec.structs.replace(sampling, speculation=False), n=4)
    with_drafts = bfloat16.generate([prompt], sampling, n=4)
    assert [(one.token_ids, one.logprobs) for one in plain] == [(one.token_ids, one.logprobs) for one in with_drafts]


def test_a_prediction_is_a_draft_and_is_counted(bfloat16):
    prompt = [5, 77, 300, 12]
    plain = bfloat16.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40, speculation=False))[0].token_ids
    for prediction in (plain, [9, *plain[20:]], [*plain[:10], 3, 3, 3, *plain[10:]], []):
        sampling = SamplingParams(temperature=0.0, max_tokens=40, prediction=prediction)
        bfloat16.scheduler.flush_stats()
        assert bfloat16.generate([prompt], sampling)[0].token_ids == plain
        if prediction == plain:
            assert sum(bfloat16.scheduler.flush_stats().accepted_per_position) >= 30


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        ({"speculative_config": '{"method": "none"}'}, "none", "as asked"),
        ({"speculative_config": None, "dtype": "float32"}, "prediction", "--deterministic"),
        ({"speculative_config": '{"method": "suffix"}', "dtype": "float32"}, "suffix", "as asked"),
    ],
)
def test_the_choice_and_its_reason_are_reported(checkpoint, settings, value, reason):
    engine = engine_of(checkpoint("qwen3"), **settings)
    choices = {name: (value, reason) for name, value, reason in engine.ready.choices}
    assert choices["speculation"][0] == value and reason in choices["speculation"][1]
    engine.generate([PERIOD * 5], SamplingParams(temperature=0.0, max_tokens=20))
    assert (engine.scheduler.flush_stats().num_drafts > 0) == (value == "suffix")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3_5", {}), ("lfm2", {"steps_in_flight": 2}), ("jamba", {}), ("mamba2", {"num_gpu_blocks_override": None})],
)
def test_a_rejected_draft_leaves_no_trace_in_a_recurrent_state(tmp_path, family, more):
    engine = engine_of(build_family(family, tmp_path), max_num_seqs=4, **more)
    runner = engine.executor._worker.runner
    prompts = [[3, 9, 7, 4] * 5, [(7 * i) % 120 + 4 for i in range(23)], [5, 6]]
    for sampling in (
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.7, seed=5, max_tokens=40),
    ):
        plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
        runner.speculator.drafters = [Adversary([p + one.token_ids for p, one in zip(prompts, plain)], 128)]
        engine.scheduler.flush_stats()
        with_drafts = engine.generate(prompts, sampling)
        assert [one.token_ids for one in with_drafts] == [one.token_ids for one in plain]
        stats = engine.scheduler.flush_stats()
        assert 20 < sum(stats.accepted_per_position) < stats.num_draft_tokens


def test_a_conversation_of_a_model_with_states_finds_its_checkpoints(tmp_path):
    engine = engine_of(build_family("qwen3_5", tmp_path), max_num_seqs=4, block_size=4)
    text = [3, 9, 7, 4] * 3
    for _ in range(4):
        sampling = [SamplingParams(temperature=0.0, max_tokens=30, speculation=on) for on in (True, False)]
        drafted, plain = (engine.generate([text], one)[0] for one in sampling)
        assert drafted.token_ids == plain.token_ids
        text = [*text, *plain.token_ids, 8]


# ---- units


class FakeTable:
    vocab_size = 100


@pytest.mark.parametrize(
    ("sampled", "draft", "want"),
    [
        ([4], [], [4]),
        ([4, 5, 6], [4, 5], [4, 5, 6]),
        ([4, 9, 6], [4, 5], [4, 9]),
        ([8, 5, 6], [4, 5], [8]),
        ([4, -1, 6], [4, 5], [4]),
        ([-1, 5, 6], [4, 5], [-1]),
    ],
)
def test_accepted(sampled, draft, want):
    assert accepted(sampled, draft) == want


def slow_match(text, tail, low, high):
    for length in range(min(high, len(tail)), low - 1, -1):
        for end in range(len(text), length - 1, -1):
            if text[end - length : end] == tail[-length:]:
                return end, length
    return 0, 0


def test_the_longest_match_is_found():
    generator = random.Random(3)
    for _ in range(500):
        text = [generator.randrange(3) for _ in range(generator.randrange(30))]
        tail = [generator.randrange(3) for _ in range(generator.randrange(1, 12))]
        low, high = generator.choice([(1, 3), (2, 2), (3, 8)])
        found = longest_match(np.array(text, np.int32), np.array(tail, np.int32), low, high)
        assert found == slow_match(text, tail, low, high)


def test_costs_are_measured_and_corrected_by_steps():
    times = {1: 10.0, 2: 11.0, 3: 20.0, 4: 25.0, 8: 30.0, 16: 40.0}
    costs = StepCosts()
    assert costs.relative_time(25) == pytest.approx(2)  # before anything is measured
    costs.measured(times)
    assert [costs.relative_time(m) for m in times] == pytest.approx([one / 10 for one in times.values()])
    assert 4 < costs.relative_time(24) < 6 and costs.relative_time(5) == pytest.approx(2.625)
    for number in range(2000):  # a machine that is busier, on which steps of 16 tokens became as fast as those of 8
        size = [1, 2, 3, 4, 8, 16][number % 6]
        costs.observe(size, 5 * min(times[size], 30.0) * (4 if number % 50 == 49 else 1))
    assert [costs.relative_time(m) for m in (1, 2, 3, 8, 16)] == pytest.approx([1, 1.1, 2, 3, 3], rel=0.1)


def test_as_many_drafts_are_verified_as_pay_together():
    costs = StepCosts()
    costs.measured({1: 10.0, 2: 11.0, 3: 20.0, 4: 25.0, 8: 30.0, 16: 40.0})
    assert Plan(costs, 1).take(0.05, 16) == 0  # 1.05 tokens in 11 instead of one in 10
    assert Plan(costs, 1).take(0.5, 16) == 1  # a second draft would double the time of the step
    assert Plan(costs, 1).take(0.98, 16) == 16
    plan = Plan(costs, 8)
    assert plan.take(0.9, 4) == 4 and plan.take(0.05, 4) == 0 and plan.num_drafts == 4
    odds = Odds()
    first = odds.probability  # at first it is hoped that a draft is right
    for _ in range(20):
        odds.learn(4, 0)
    assert odds.probability < 0.35 < first
    for _ in range(100):
        odds.forget()
    assert odds.probability > 0.8  # tried again


@given(
    st.lists(st.floats(0.001, 1.0), min_size=16, max_size=16),
    st.integers(1, 40),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 16)), max_size=4),
    st.integers(1, 16),
    st.floats(0, 1),
)
def test_drafts_are_not_looked_for_where_none_pay(increases, num_rows, taken, limit, probability):
    costs = StepCosts()
    costs.measured(dict(zip(KNOTS.tolist(), np.cumsum(increases).tolist())))
    plan = Plan(costs, num_rows)
    for odds, number in taken:
        plan.take(odds, number)
    if probability <= plan.least_odds(limit):
        assert plan.take(probability, limit) == 0


def test_a_step_of_many_rows_looks_for_no_drafts():
    costs = StepCosts(slope=1.0)  # a draft takes as long as a step
    speculator = Speculator(Speculation(lookup=(1, 8)), None, 16, costs=costs)
    speculator.drafters = [_NeverAsked()]
    for row in range(4):
        speculator.add(row, NewRequest(row, [1, 2, 1, 2], 4, [[0]], SamplingParams(max_tokens=9)))
    step = StepInput(0, [], [0, 1, 2, 3], [3] * 4, [1] * 4, [[]] * 4, [0, 1, 2, 3])
    assert speculator.after_step(step, {}, [[1]] * 4) == ({}, [])


class _NeverAsked:
    def propose(self, row, history, limit):
        raise AssertionError("drafts were looked for")



def test_costs_are_measured_while_idle_and_leave_no_trace(checkpoint, native_kernels):
    engine = engine_of(checkpoint("qwen3"), deterministic=True, dtype="bfloat16", speculative_config=None)
    assert engine.ready.works_idle
    prompt, sampling = PERIOD * 6, SamplingParams(temperature=0.0, max_tokens=30, logprobs=1)
    before = engine.generate([prompt], sampling)[0]
    runner = engine.executor._worker.runner
    while engine.executor.workers.work_idle():
        pass
    assert sorted(runner.measurement.seconds) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert runner.speculator.costs.relative_time(16) >= runner.speculator.costs.relative_time(1) == 1
    after = engine.generate([prompt], sampling)[0]
    assert after.num_cached_tokens > 0 and (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def history(prompt, outputs=(), prediction=None):
    sampling = SamplingParams(prediction=prediction)
    return History(NewRequest(0, [*prompt, *outputs], len(prompt), [], sampling))


def replay(
    speculator: Speculator, prompt: list[int], text: list[int], row: int = 0, scope: str = "k\0", name: str = ""
) -> int:
    """Let a request write `text`, whatever is drafted. Returns its number of steps."""
    sampling = SamplingParams(max_tokens=len(text))
    speculator.remove(row)
    speculator.add(row, NewRequest(row, prompt, len(prompt), [], sampling, conversation=name, scope=scope))
    step = StepInput(0, [], [row], [0], [1], [[]], [0])
    done, draft, steps = 0, [], 0
    while done < len(text):
        sampled = text[done : done + len(draft) + 1]
        ids = accepted([*sampled, *[-1] * (len(draft) + 1 - len(sampled))], draft)
        done, steps = done + len(ids), steps + 1
        speculator.after_step(step, {0: draft} if draft else {}, [ids])
        draft = speculator.rows[row].draft
    return steps


def remembering(capacity: int = 1 << 20, num: int | None = None) -> Speculator:
    speculation = Speculation(lookup=(3, 16), num_draft=num, earlier=True)
    return Speculator(speculation, GrammarRows(FakeTable(), None), 64, capacity=capacity)


def code(seed: int, size: int = 600) -> list[int]:
    """Return a text with words that repeat, as code has them."""
    generator = random.Random(seed)
    words = [[generator.randrange(10, 5000) for _ in range(generator.randrange(1, 4))] for _ in range(60)]
    return [token for _ in range(size) for token in generator.choice(words)][:size]


def test_a_file_written_again_with_one_change_takes_two_fifths_of_the_steps():
    """The second prompt does not hold the file: the agent has shortened its conversation, or begun another."""
    speculator, file = remembering(), code(1)
    first = replay(speculator, [1, 2, 3, 7, 8, 9], file)
    changed = [*file[:300], 5001, 5002, 5003, 5004, *file[302:]]
    second = replay(speculator, [1, 2, 4, 7, 8, 9], changed)
    assert first > 300 and second <= 0.4 * first
    assert second <= 0.2 * first  # also after the change it is followed
    beside = replay(speculator, [1, 2, 5, 7, 8, 9], changed, row=1)  # while another row holds the last text
    assert beside <= 0.2 * first


@pytest.mark.parametrize("other", ["other\0", "k\0salt", ""])
def test_texts_of_another_key_or_salt_change_no_draft_and_no_step(other):
    """Neither tokens nor the number of drafts tell that another tenant wrote the same before."""
    file = code(1)
    alone = remembering()
    untouched = [replay(alone, [1, 2, 3], text, scope="k\0") for text in (code(2), file)]
    speculator = remembering()
    replay(speculator, [1, 2, 3], file, row=3, scope=other)
    after = [replay(speculator, [1, 2, 3], text, scope="k\0") for text in (code(2), file)]
    assert after == untouched
    assert replay(speculator, [1, 2, 3], file, scope=other) < 0.2 * after[1]


def test_a_conversation_and_all_texts_are_forgotten():
    file = code(1)
    for forget in (lambda one: one.forget("k/a"), lambda one: one.forget_all()):
        speculator = remembering()
        first = replay(speculator, [1, 2, 3], file, name="k/a")
        follower = NewRequest(1, [5, *file[:20]], 21, [], SamplingParams(), scope="k\0")
        speculator.add(1, follower)
        history = speculator.rows[1].history
        assert speculator.drafters[-2].propose(1, history, 3) == file[20:23]
        forget(speculator)
        assert speculator.drafters[-2].propose(1, history, 3) == []  # although it was followed
        again = replay(speculator, [1, 2, 3], file)
        assert again > 0.9 * first


def test_texts_are_named_by_their_conversation():
    speculator, prompt = remembering(num=3), list(range(20, 60))
    speculator.add(0, NewRequest(0, prompt, 40, [], SamplingParams(), conversation="k/a", scope="k\0"))
    propose = speculator.drafters[-2].propose

    def ask(row: int) -> list[int]:
        speculator.remove(row)
        speculator.add(row, NewRequest(row, [1, *prompt[5:12]], 8, [], SamplingParams(), scope="k\0"))
        return propose(row, speculator.rows[row].history, 3)

    assert ask(1) == prompt[12:15]  # of a row that was not used again
    speculator.forget("k/b")
    assert ask(2) == prompt[12:15]
    speculator.forget("k/a")
    speculator.rows[1].history.forget()  # else it wrote the same
    speculator.rows[2].history.forget()
    assert ask(3) == []


def test_earlier_texts_are_bounded_and_dropped_from_the_scope_with_most():
    texts = EarlierTexts(4 * SEGMENT)
    small, large = np.arange(10, 200, dtype=np.int32), np.arange(1000, 1000 + 3 * SEGMENT, dtype=np.int32)
    texts.add("small\0", "", small, Progress())
    for turn in range(9):
        texts.add("large\0", "", large + turn * SEGMENT, Progress())
        assert texts.num_segments <= 4
        assert texts.find("small\0", small[:9]) is not None  # a flood of another's texts leaves them alone
    for number in range(50):
        texts.add(f"{number}\0", "", small, Progress())
        assert texts.num_segments <= 4 and len(texts._scopes) <= 5
    assert EarlierTexts(10).max_segments == 1 and EarlierTexts(1 << 40).max_segments * SEGMENT == 1 << 20


def test_a_prompt_that_goes_on_is_kept_once():
    texts, text = EarlierTexts(), np.array(code(3, 40_000), dtype=np.int32)
    for turn in range(1, 21):
        progress = Progress()
        texts.add("k\0", "", text[: 2000 * turn - 500], progress)  # the prompt
        texts.add("k\0", "", text[: 2000 * turn], progress)  # and its answer
    assert sum(segment.size for segment in texts._scopes["k\0"].segments) < 1.15 * len(text)
    for start in range(0, 39_000, 777):  # also where a text goes on in another segment
        places = [
            (found_after(texts, text[one : one + 16]), text[one + 16 : one + 20]) for one in range(start, start + 4)
        ]
        assert all(found is None or found == after.tolist() for found, after in places)
        assert any(found is not None for found, _ in places)  # one place of the table may belong to two texts


def found_after(texts: EarlierTexts, tail: np.ndarray) -> list[int] | None:
    found = texts.find("k\0", tail)
    if found is None:
        return None
    place, length = longest_match(found, tail, 5, 16)
    return found[place : place + 4].tolist() if length == 16 else None


@pytest.mark.slow
def test_two_tenants_with_adapters_over_two_turns_equal_no_speculation(checkpoint, tmp_path, native_kernels):
    folder = checkpoint("qwen3")
    adapter = use(make_adapter(tmp_path / "adapter", folder, 8, seed=1))
    settings = {"enable_lora": True, "speculative_config": None, "num_gpu_blocks_override": 3000}
    engine = engine_of(folder, deterministic=True, dtype="bfloat16", **settings)
    prompts, sampling = requests()
    uses = [[adapter] if i % 2 else [] for i in range(len(prompts))]
    plain = engine.generate(
        prompts, [msgspec.structs.replace(one, speculation=False) for one in sampling], adapters=uses
    )
    for salt in ("a", "b", "a"):
        engine.cache_salt = salt
        drafted = engine.generate(prompts, sampling, adapters=uses)
        assert [(one.token_ids, one.logprobs) for one in drafted] == [(one.token_ids, one.logprobs) for one in plain]
    speculator = engine.executor._worker.runner.speculator
    assert sorted(speculator.earlier._scopes) == ["\0a", "\0b"]
    engine.executor.workers.forget_texts()
    assert not speculator.earlier._scopes


def test_lookup_proposes_what_followed_and_continues_repetitions():
    lookup = LookupDrafter(2, 8, False)
    assert lookup.propose(0, history([1, 2, 3, 4, 5, 9, 2, 3]), 3) == [4, 5, 9]
    assert lookup.propose(0, history([1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]
    assert lookup.propose(0, history([1, 2, 3, 4]), 5) == []
    assert LookupDrafter(1, 8, True).propose(0, history([1, 2, 3, 4, 9, 1, 2]), 5) == [3, 4]


def test_a_prediction_is_followed_and_found_again():
    propose = PredictionDrafter().propose
    prediction = [1, 2, 3, 4, 5, 6, 7]
    assert propose(0, history([50], [], prediction), 3) == [1, 2, 3]
    assert propose(0, history([50], [1, 2], prediction), 3) == [3, 4, 5]
    assert propose(0, history([50], [1, 9], prediction), 3) == []
    assert propose(0, history([50], [1, 9, 9, 3, 4, 5], prediction), 3) == [6, 7]
    assert propose(0, history([50], [1], []), 3) == []


def test_a_lookup_searches_the_newest_tokens_only():
    """Its cost does not grow with the context: at most `MAX_SEARCHED` tokens are compared."""
    generator = random.Random(0)
    old = [1, 2, 3, 4, 5, 6, 7]
    middle = [generator.randrange(10, 50_000) for _ in range(MAX_SEARCHED)]
    lookup = LookupDrafter(3, 16, False)
    assert lookup.propose(0, history([*old, *middle, 2, 3, 4]), 3) == []
    assert lookup.propose(0, history([*old, *middle[100:], 2, 3, 4]), 3) == [5, 6, 7]


# ---- draft models


def drafted(draft: str, num: int | None = 3) -> dict[str, str]:
    config = {"method": "draft_model", "model": draft} | ({"num_speculative_tokens": num} if num else {})
    return {"speculative_config": json.dumps(config)}


def drafting_engine(target: str, draft: str, num: int | None = 3, **settings) -> InProcessEngine:
    return engine_of(target, **drafted(draft, num) | settings)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 4, None])
def test_a_model_that_drafts_for_itself_is_always_right(checkpoint, num):
    """Its keys and values are where the model's are, whatever the chunks, shared prefixes and drafts before."""
    folder = checkpoint("qwen3")
    engine = drafting_engine(folder, folder, num, max_num_batched_tokens=24, enable_prefix_caching=True)
    drafter = engine.executor._worker.runner.speculator.model
    assert drafter.cost == 1
    drafter.cost = 0.05  # else its drafts would never pay
    prompts, _ = requests()
    for sampling in (
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.8, seed=4, max_tokens=30),
    ):
        plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
        engine.scheduler.flush_stats()
        with_drafts = engine.generate(prompts, sampling)
        assert [one.token_ids for one in plain] == [one.token_ids for one in with_drafts]
        stats = engine.scheduler.flush_stats()
        assert sum(stats.accepted_per_position) >= 0.98 * stats.num_draft_tokens > 50
        assert num is None or stats.num_draft_tokens <= stats.num_drafts * num


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"num_gpu_blocks_override": 13, "max_model_len": "128"}, {"max_num_batched_tokens": 24}]
)
def test_drafts_of_another_model_change_nothing(checkpoint, native_kernels, settings):
    other = checkpoint("qwen3", seed=1, num_hidden_layers=1, head_dim=16)
    engine = drafting_engine(checkpoint("qwen3"), other, deterministic=True, dtype="bfloat16", **settings)
    check_equal(engine)
    prompt, sampling = PERIOD * 6, SamplingParams(temperature=0.8, seed=40, max_tokens=30, logprobs=1)
    plain = engine.generate([prompt], msgspec.structs.replace(sampling, speculation=False), n=4)
    with_drafts = engine.generate([prompt], sampling, n=4)
    assert [(one.token_ids, one.logprobs) for one in plain] == [(one.token_ids, one.logprobs) for one in with_drafts]


def refused(target: str, draft: str, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        drafting_engine(target, draft, **settings)
    assert str(caught.value).startswith("--speculative-config: model: ")
    return str(caught.value)


def test_draft_models_that_cannot_draft_are_refused_at_start(checkpoint, tmp_path):
    target = checkpoint("qwen3")
    assert "vocab_size is 640, but that of the model is" in refused(target, checkpoint("qwen3", vocab_size=640))
    assert "no recurrent states" in refused(checkpoint("qwen3", vocab_size=128), build_family("lfm2", tmp_path / "s"))
    assert "config.json" in refused(target, str(tmp_path))
    with pytest.raises(ValueError, match="--speculative-config: no layer of the model attends to all tokens"):
        drafting_engine(checkpoint("mistral"), target)
    other = tmp_path / "other"
    shutil.copytree(checkpoint("qwen3"), other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<changed>"
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "the vocabularies differ in 1 tokens: token" in refused(target, str(other))


@pytest.mark.slow
def test_a_draft_model_counts_in_the_plan(checkpoint):
    """Its weights, and its keys and values in the same blocks."""
    target, draft = checkpoint("qwen3"), checkpoint("qwen3", seed=1, num_hidden_layers=1, head_dim=16)
    alone, both = (engine_of(target, **one).ready for one in ({}, drafted(draft)))
    kv = alone.plan.bytes_per_block // 3 // 2  # three layers, and heads half as wide
    assert both.plan.bytes_per_block - alone.plan.bytes_per_block == kv
    assert both.plan.weights > alone.plan.weights and both.groups == alone.groups
