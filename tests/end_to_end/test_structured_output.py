"""Constrained outputs of real workers: valid, and the same in every layout and with every other parameter."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from quire.engine.messages import SamplingParams, Vocabulary
from quire.server.structured.compile_process import Compiler
from quire.server.structured.compile_process import Vocabulary as CompilerVocabulary
from quire.server.structured.structure import Structure
from quire.worker.messages import ThinkingBudget
from quire.worker.sampling.grammar import Tokens, _Matcher
from tests.end_to_end.test_recovery import SCRIPT, TINY, crowd, wait_for_death
from tests.end_to_end.test_recovery import check as check_answers
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.checkpoints import CHAT_TEMPLATE, VOCAB_SIZE
from tests.server.test_launch import HELLO, server_process

EOS, THINK_END = 2, 3
PIECES = ['"', '":', '",', '"}', '{"', "true", "10", '": "', '","', "ä", " a", "ab", "name", "}"]
TOKENS = [b"", b"<s>", b"</s>", b"</think>", *(bytes([byte]) for byte in range(256))]
TOKENS += [piece.encode() for piece in PIECES][: VOCAB_SIZE - len(TOKENS)]
TOKENS += [b""] * (VOCAB_SIZE - len(TOKENS))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 3]}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": -20, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPILER = Compiler(CompilerVocabulary({"<s>": 1, "</s>": 2, "</think>": 3}, [EOS], VOCAB_SIZE))
SETTINGS = {
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": "128",
    "num_threads": 1,
}
PROMPTS = [list(range(4, 4 + length)) for length in (5, 40, 17, 3, 30, 9)]


def grammar(structure: Structure) -> str:
    answer = COMPILER.compile(structure)
    assert answer.grammar is not None, answer.error
    return answer.grammar


JSON = grammar(Structure(kind="json_schema", value=SCHEMA, compact=True))


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80, "seed": 1, "eos_token_ids": [EOS], "grammar": JSON, **fields})


def thinking(size: int, **fields) -> SamplingParams:
    """The prompt has opened thoughts, which end after `size` tokens at most; then the object."""
    budget = ThinkingBudget(size, True, (1,), (THINK_END,), (4 + ord("\n"), THINK_END))
    return params(thinking=budget, grammar_after=[THINK_END], **fields)


# every other parameter beside a grammar, and a row without one
MIXED = [
    params(temperature=0),
    params(seed=5, logprobs=2, top_p=0.9),
    params(seed=6, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=60),
    SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True, logprobs=1),
    params(seed=8, bad_words_ids=[[4 + ord("b")], [4 + 256 + PIECES.index("ab")]], logit_bias={4 + ord("x"): 5.0}),
    thinking(9, seed=3, logprobs=1, frequency_penalty=0.4, logit_bias={THINK_END: -100.0}),
]


def text(result: Result) -> str:
    """The text after the thoughts."""
    _, *ids = (
        result.token_ids[result.token_ids.index(THINK_END) :]
        if THINK_END in result.token_ids
        else [0, *result.token_ids]
    )
    return b"".join(TOKENS[token] for token in ids if token != EOS).decode()


def check(result: Result) -> None:
    assert (result.error, result.finish_reason) == (None, "stop")
    jsonschema.validate(json.loads(text(result)), SCHEMA)


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    """The outputs of `MIXED` at depth 1 on one rank."""
    return [result.token_ids for result in engine.generate(PROMPTS, MIXED)]


def start(engine):
    vocabulary = Vocabulary(TOKENS, [1, 2, 3], [EOS])
    engine.executor.workers.set_vocabulary(msgspec.msgpack.encode(vocabulary))
    return engine


def test_answers_are_valid_beside_other_parameters_and_rows(engine):
    results = engine.generate(PROMPTS, MIXED)
    for result, sampling in zip(results, MIXED):
        if sampling.grammar is not None:
            check(result)
    assert "b" not in text(results[4])
    assert len(results[2].token_ids) > 60  # end-of-sequence tokens fill up what the text does not need
    assert results[3].error is None and results[3].finish_reason == "length"
    assert results[5].token_ids.index(THINK_END) == 9 + 1


def test_many_seeds(engine):
    for result in engine.generate([[7, 8]] * 24, [params(seed=seed) for seed in range(24)]):
        check(result)


def test_log_probabilities_are_those_of_allowed_tokens(engine):
    """As in vLLM: of the logits after the grammar's mask."""
    (result,) = engine.generate([[5, 6]], params(temperature=0, logprobs=5))
    first = result.logprobs[0]
    assert {TOKENS[token][:1] for token, value in zip(first.token_ids, first.logprobs) if value > -1e30} == {b"{"}
    assert sum(2.718281828**value for value in first.logprobs[1:3]) == pytest.approx(1, abs=1e-3)


def test_an_answer_cut_by_length_is_a_prefix(engine):
    (whole,) = engine.generate([[5, 6]], params())
    for count in (1, 5, len(whole.token_ids) - 1):
        (cut,) = engine.generate([[5, 6]], params(max_tokens=count))
        assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:count])


def test_ignore_eos_pads_with_the_end_of_the_sequence(engine):
    (whole,) = engine.generate([[5, 6]], params())
    (padded,) = engine.generate([[5, 6]], params(ignore_eos=True))
    assert padded.finish_reason == "length"
    assert padded.token_ids == whole.token_ids + [EOS] * (80 - len(whole.token_ids))


def test_a_resubmitted_request_continues_in_the_middle_of_an_object(engine):
    (whole,) = engine.generate([[5, 6]], params())
    for count in range(0, len(whole.token_ids) - 1, 3):
        (rest,) = engine.generate([[5, 6]], params(), outputs=[whole.token_ids[:count]])
        assert whole.token_ids[:count] + rest.token_ids == whole.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 7, 200])
def test_a_resubmitted_request_continues_in_the_middle_of_thoughts(engine, size):
    """The budget counts the tokens from before, and the marker is forced once."""
    sampling = thinking(size, seed=4, logit_bias={THINK_END: -100.0})
    (whole,) = engine.generate([[5, 6]], sampling)
    assert whole.token_ids.count(THINK_END) == int(size < 80)
    for count in range(0, 24):
        (rest,) = engine.generate([[5, 6]], sampling, outputs=[whole.token_ids[:count]])
        assert whole.token_ids[:count] + rest.token_ids == whole.token_ids


def test_several_choices(engine):
    """Each has a matcher and a budget of its own, and is the answer to a request of its seed."""
    for sampling in (params(seed=20), thinking(5, seed=20)):
        choices = engine.generate([[5, 6], list(range(4, 40))], sampling, n=3)
        alone = [params(seed=20 + k) if sampling.thinking is None else thinking(5, seed=20 + k) for k in range(3)]
        for choice, expected in zip(choices, engine.generate([[5, 6]] * 3 + [list(range(4, 40))] * 3, alone * 2)):
            check(choice)
            assert choice.token_ids == expected.token_ids


def test_prefix_hits_do_not_change_the_answer(engine):
    prompt = list(range(10, 60))
    first, again = (engine.generate([prompt], params(seed=9))[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    assert again.token_ids == first.token_ids
    check(first)


def test_a_grammar_may_begin_after_the_thoughts(engine):
    """The part before is not constrained, and the marker ends it wherever it comes."""
    thoughts = [40, 1, 50, THINK_END]
    forced = params(grammar_after=[THINK_END], seed=4)
    (result,) = engine.generate([[5, 6]], forced, outputs=[thoughts])
    check(result)
    (free,) = engine.generate(
        [[5, 6]], params(grammar_after=[THINK_END], seed=4, max_tokens=20, logit_bias={3: -100.0})
    )
    plain = SamplingParams(max_tokens=20, seed=4, eos_token_ids=[EOS], logit_bias={3: -100.0})
    assert free.token_ids == engine.generate([[5, 6]], plain)[0].token_ids


def test_constraints_that_exclude_every_token_fail_only_their_request(engine):
    nothing = params(allowed_token_ids=[4 + ord("x")])
    bad, good = engine.generate([[5, 6], [5, 6]], [nothing, params()])
    assert "structured output" in bad.error and bad.finish_reason == "error"
    check(good)


def test_a_grammar_that_does_not_compile_fails_only_its_request(engine):
    bad, good = engine.generate([[5, 6], [5, 6]], [params(grammar="start: ("), params()])
    assert bad.error.startswith("structured output: ")
    check(good)


def test_without_a_vocabulary_only_the_request_fails(checkpoint):
    engine = InProcessEngine(checkpoint("qwen3"), **SETTINGS)
    try:
        bad, good = engine.generate([[5, 6], [5, 6]], [params(), params(grammar=None, max_tokens=3)])
    finally:
        engine.close()
    assert "vocabulary" in bad.error and good.error is None


@pytest.mark.slow
def test_preemption(checkpoint, engine):
    """Long answers in a small cache: matchers and budgets start again in the middle."""
    schema = {"type": "array", "items": {"enum": ["a", "bc", 3, None]}, "minItems": 30, "maxItems": 40}
    text = grammar(Structure(kind="json_schema", value=schema, compact=True))
    sampling = [params(grammar=text, max_tokens=110, seed=seed) for seed in range(2)]
    sampling += [thinking(size, grammar=text, max_tokens=110, seed=size) for size in (12, 60)]
    prompts = [[4, 5, 6]] * 4
    small = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS | {"num_gpu_blocks_override": 18}))
    try:
        results = small.generate(prompts, sampling)
    finally:
        small.close()
    assert sum(result.num_preemptions for result in results) > 0
    assert [result.token_ids for result in results] == [one.token_ids for one in engine.generate(prompts, sampling)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"steps_in_flight": 2}, {"steps_in_flight": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}],
)
def test_depth_and_chunks(checkpoint, expected, settings):
    engine = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS | settings))
    try:
        assert [result.token_ids for result in engine.generate(PROMPTS, MIXED)] == expected
    finally:
        engine.close()


class Oracle:
    """Drafts the right answer, with a wrong token now and then."""

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def propose(self, row, history, limit: int) -> list[int]:
        text = history.tokens.tolist()
        rest = next((one[len(text) :] for one in self.texts if one[: len(text)] == text), [])[:limit]
        return [token if (len(text) + k) % 7 else 4 + ord("x") for k, token in enumerate(rest)]


@pytest.mark.parametrize("method", ["grammar", "auto", "oracle"])
def test_drafts_do_not_change_an_answer(checkpoint, expected, method):
    """Matchers see each position after drafts, and forget those that were rejected."""
    config = json.dumps({"method": method.replace("oracle", "auto"), "num_speculative_tokens": 6})
    drafting = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS | {"speculative_config": config}))
    try:
        if method == "oracle":
            texts = [prompt + ids for prompt, ids in zip(PROMPTS, expected)]
            drafting.executor._worker.runner.speculator.drafters = [Oracle(texts)]
        results = drafting.generate(PROMPTS, MIXED)
        assert [result.token_ids for result in results] == expected
        counts = drafting.scheduler.flush_stats()
        assert sum(counts.accepted_per_position) > {"grammar": 10, "auto": 15, "oracle": 100}[method]
        # a token that is forced is always right, unless another parameter excludes it
        assert method != "grammar" or counts.num_draft_tokens == sum(counts.accepted_per_position)
    finally:
        drafting.close()


def test_the_end_of_a_forced_text_is_guessed_as_the_model_wrote_it_last():
    tokens = Tokens(msgspec.msgpack.encode(Vocabulary(TOKENS, [1, 2, 3], [EOS])), VOCAB_SIZE)
    quote, colon, name = (tokens.longest(one) for one in (b'"', b'":', b"name"))
    matcher = _Matcher(None, spells=True)
    spaced = grammar(Structure(kind="json_schema", value=SCHEMA))
    matcher.start(tokens.matcher(spaced), [TOKENS.index(b'{"'), name])
    assert tokens.spelled(matcher) is None  # the model chooses
    assert tokens.guess(matcher, b'"') == quote
    tokens.learn(matcher, quote, colon)
    assert tokens.guess(matcher.copy(), b'"') == colon and matcher.copy().try_draft(colon)
    assert tokens.guess(matcher, b'"x') == quote  # more is forced, with which the longer token does not agree
    tokens.learn(matcher, quote, TOKENS.index(b'",'))
    assert tokens.guess(matcher, b'"') == quote  # the grammar does not allow the longer one here
    tokens.learn(matcher, colon, quote)
    assert tokens.guess(matcher, b'"') == quote and not matcher.preferred


@pytest.mark.slow
def test_keys_of_a_schema_have_one_spelling_and_cost_no_step(checkpoint):
    keys = ["name_of_the_customer", "able_to_pay"]
    schema = {"type": "object", "properties": {key: {"type": "boolean"} for key in keys}, "required": keys}
    compact = grammar(Structure(kind="json_schema", value=schema | {"additionalProperties": False}, compact=True))
    config = json.dumps({"method": "auto", "num_speculative_tokens": 32})
    drafting = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS | {"speculative_config": config}))
    try:
        found = set()
        for seed in range(6):
            sampling = params(grammar=compact, seed=seed, temperature=1.0)
            (plain,) = drafting.generate([[5, 6]], msgspec.structs.replace(sampling, speculation=False))
            drafting.scheduler.flush_stats()
            (result,) = drafting.generate([[5, 6]], sampling)
            counts = drafting.scheduler.flush_stats()
            assert result.token_ids == plain.token_ids and set(json.loads(text(result))) == set(keys)
            steps = len(result.token_ids) - sum(counts.accepted_per_position)
            values = sum(len(str(value)) + 1 for value in json.loads(text(result)).values())
            assert len(result.token_ids) > 25 and steps <= 2 + values
            found.add(tuple(result.token_ids[:16]))
        assert all(TOKENS.index(b"name") in ids for ids in found)
        assert len({ids[ids.index(TOKENS.index(b"name")) :][:10] for ids in found}) == 1
    finally:
        drafting.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks(checkpoint, expected, layout):
    engine = start(InProcessEngine(checkpoint("qwen3"), **SETTINGS | {layout: 2, "debug_check_ranks": True}))
    try:
        assert [result.token_ids for result in engine.generate(PROMPTS, MIXED)] == expected
    finally:
        engine.close()


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_of_objects(checkpoint, tmp_path):
    """Clients of HTTP get the texts of an undisturbed run, each valid."""
    schema = {"type": "array", "items": {"enum": ["a", "bc", None, 17]}, "minItems": 30}
    others = [{"thinking_token_budget": 40}, {"stop": ["null,17"], "logprobs": True}, {"presence_penalty": 0.5}]
    bodies = [
        {
            "messages": HELLO,
            "max_tokens": 300,
            "stream": number % 2 == 0,
            "n": 1 + number % 3,
            "seed": number,
            "temperature": 1.0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}},
            **others[number % len(others)],
        }
        for number in range(9)
    ]
    opened = CHAT_TEMPLATE + "{{ '<think>' }}"
    settings = TINY | {"chat_template": opened, "reasoning_parser": "think"}
    with server_process(checkpoint("qwen3"), tmp_path, script=SCRIPT, **settings) as server:
        expected, duration = crowd(server.wait_ready(), bodies)
        engine = server.engine()

        def disturb() -> None:
            engine.kill()
            wait_for_death(server, engine, serving=False)

        answers, _ = crowd(server, bodies, disturb, after=duration / 2)
    check_answers(answers, expected)
    for body, answer in zip(bodies, answers):
        for choice in answer:
            if choice.finish_reason == "stop" and "stop" not in body:
                jsonschema.validate(json.loads(choice.text), schema)
