"""Drafts on real models: tokens and log-probabilities equal those without, bit for bit, whoever drafts."""

from __future__ import annotations

import json
import random
import shutil

import msgspec
import numpy as np
import pytest

from quire.worker.messages import NewRequest, NoRepeatNgram, SamplingParams, ThinkingBudget
from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.speculation.choice import Speculation
from quire.worker.sampling.speculation.costs import Odds, Plan, StepCosts
from quire.worker.sampling.speculation.drafter import History
from quire.worker.sampling.speculation.earlier import EarlierTexts
from quire.worker.sampling.speculation.lookup import MAX_SEARCHED, LookupDrafter, PredictionDrafter, longest_match
from quire.worker.sampling.speculation.speculator import Speculator, _Row, accepted
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


def test_earlier_texts_of_a_conversation_are_a_source_for_it_alone():
    speculator = Speculator(Speculation(lookup=(2, 8), num_draft=3), GrammarRows(FakeTable(), None), 64)

    def begin(row: int, conversation: str) -> _Row:
        speculator.remove(row)
        speculator.add(row, NewRequest(row, [8, 2, 3], 3, [], SamplingParams(), conversation=conversation))
        return speculator.rows[row]

    speculator.add(0, NewRequest(0, [1, 2, 3, 4, 5], 5, [], SamplingParams(), conversation="key/a\0"))
    propose = speculator.drafters[-1].propose
    assert propose(1, begin(1, "key/a\0").history, 3) == [4, 5]  # of a row that was not used again
    speculator.rows[1].history.add([4, 9])
    begin(0, "")
    assert propose(2, begin(2, "key/a\0").history, 3) == [4, 9]
    for other in ("key/b\0", "other/a\0", "key/a\0salt", ""):
        assert propose(3, begin(3, other).history, 3) == []
    speculator.forget("key/a")
    assert propose(4, begin(4, "key/a\0").history, 3) == []  # which the row itself begins anew


def test_earlier_texts_are_bounded():
    earlier = EarlierTexts()
    for number in range(200):
        earlier.add(f"k/{number}\0", np.full(20_000, number, np.int32))
    earlier.add("k/199\0", np.full(20_000, 7, np.int32))
    assert len(earlier.tokens("k/0\0")) == 0 and len(earlier.tokens("k/150\0")) == 20_001
    assert len(earlier.tokens("k/199\0")) == 1 << 15 and set(earlier.tokens("k/199\0").tolist()) == {199, 7, -1}


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


def test_a_draft_model_counts_in_the_plan(checkpoint):
    """Its weights, and its keys and values in the same blocks."""
    target, draft = checkpoint("qwen3"), checkpoint("qwen3", seed=1, num_hidden_layers=1, head_dim=16)
    alone, both = (engine_of(target, **one).ready for one in ({}, drafted(draft)))
    kv = alone.plan.bytes_per_block // 3 // 2  # three layers, and heads half as wide
    assert both.plan.bytes_per_block - alone.plan.bytes_per_block == kv
    assert both.plan.weights > alone.plan.weights and both.groups == alone.groups
