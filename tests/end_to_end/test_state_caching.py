"""Prefix caching of a model with recurrent states: what the next turn of a conversation computes, and what it says."""

from __future__ import annotations

import json
import random

import pytest

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.worker import memory
from quire.worker.cpu.device import CpuPlatform
from quire.worker.limits import resolve_limits
from quire.worker.models.registry import parse_model_spec
from quire.worker.spec.model import kv_bytes_per_token
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import VOCAB, build_family
from tests.worker.batch.test_split_step import limit_tokens

BLOCK = 16
GREEDY = SamplingParams(max_tokens=23, temperature=0.0, ignore_eos=True)


def engine_for(folder: str, **settings) -> InProcessEngine:
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": "2048"}
    return InProcessEngine(folder, **sizes | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return build_family("qwen3_5", tmp_path_factory.mktemp("states"))


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "turns", "drafts"),
    [("qwen3_5", 1, 30, None), ("qwen3_5", 2, 8, None), ("mamba2", 1, 8, None), ("qwen3_5", 1, 8, "suffix")],
)
def test_each_turn_of_a_conversation_computes_its_new_text(name, depth, turns, drafts, tmp_path):
    folder = build_family(name, tmp_path)
    asked = {"speculative_config": json.dumps({"method": drafts, "num_speculative_tokens": 4})} if drafts else {}
    engine = engine_for(folder, steps_in_flight=depth, **asked)
    uncached = engine_for(folder, enable_prefix_caching=False)
    history, computed = words(0, 70), 0
    for turn in range(turns):
        (result,) = engine.generate([history], GREEDY)
        assert result.num_cached_tokens == computed // BLOCK * BLOCK, f"turn {turn}"
        if turn % 7 == 0:
            assert uncached.generate([history], GREEDY)[0].token_ids == result.token_ids
        history = history + result.token_ids
        computed = len(history) - 1  # the last token was sampled, not computed
        history = history + words(turn + 1, 3 + turn)
    if drafts:
        assert engine.scheduler.counts.num_draft_tokens > 0
    engine.close()
    uncached.close()


@pytest.mark.parametrize("length", [65, 127, 200, 260])
def test_a_hit_ends_less_than_64_tokens_before_the_common_text(folder, length):
    """At the default size of blocks, which the states do not enlarge."""
    engine, prompt = InProcessEngine(folder, max_num_seqs=4, max_model_len="2048"), words(0, length)
    attending = [group for group in engine.ready.groups if group.kind != "state"]
    assert engine.ready.block_size <= 64 and len(attending) == 1
    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    (result,) = engine.generate([prompt + words(1, 9)], GREEDY)
    engine.close()
    assert length - 64 < result.num_cached_tokens <= length


@pytest.mark.parametrize(
    "raw",
    [
        {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 24, "hidden_size": 1024, "head_dim": 256},
        {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 1024, "layer_types": ["conv", "full_attention"] * 8},
    ],
    ids=lambda raw: raw["architectures"][0],
)
def test_states_do_not_enlarge_the_blocks_of_attention(raw):
    """Blocks of real shapes hold the keys and values of their tokens, and nothing else."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "dtype": "bfloat16", "num_hidden_layers": 16} | raw
    spec = parse_model_spec(heads)
    config = Config.from_flat(model="unused", device="cpu", max_model_len="4096", dtype="bfloat16")
    limits = resolve_limits(config, spec, CpuPlatform())
    assert limits.attention.block_size <= 64 and memory.bytes_per_state(config, spec, limits) > 0
    per_token = kv_bytes_per_token(spec, 2)
    assert memory.bytes_per_block(config, spec, limits) == limits.attention.block_size * per_token


def test_an_edited_last_turn_resumes_before_the_edit(folder):
    engine = engine_for(folder)
    first = words(1, 100)
    history = first + engine.generate([first], GREEDY)[0].token_ids
    end = (len(history) - 1) // BLOCK * BLOCK
    for edit in range(3):
        (result,) = engine.generate([history + words(10 + edit, 50)], GREEDY)
        assert result.num_cached_tokens == end
    engine.close()


@pytest.mark.parametrize(("turn_start", "cached"), [(71, 64), (0, 0)])
def test_a_prompt_leaves_a_checkpoint_before_the_last_turn(folder, turn_start, cached):
    """A long prompt that no turn was computed of before, and another end of it."""
    engine, system = engine_for(folder), words(5, 75)
    results = [engine.generate([system + words(60 + i, 40)], GREEDY, turn_start=turn_start)[0] for i in range(2)]
    engine.close()
    assert [result.num_cached_tokens for result in results] == [0, cached]


def test_a_prefix_of_several_prompts_is_a_checkpoint_from_the_second_on(folder):
    """A system prompt: the first request passes its end within a chunk, the second stops there."""
    engine, system = engine_for(folder), words(2, 75)
    cached = [engine.generate([system + words(20 + i, 30)], GREEDY)[0].num_cached_tokens for i in range(4)]
    engine.close()
    assert cached == [0, 0, 64, 64]


def test_choices_share_the_state_of_their_prompt(folder):
    engine, prompt = engine_for(folder), words(3, 90)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True, seed=5)
    results = engine.generate([prompt], sampling, n=3)
    alone = [
        engine.generate([prompt], SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True, seed=5 + k))[
            0
        ].token_ids
        for k in range(3)
    ]
    engine.close()
    assert [result.token_ids for result in results] == alone
    assert sorted(result.num_cached_tokens for result in results) == [0, 80, 80]


def test_few_pages_for_states_limit_the_requests_that_run_not_the_tokens(folder):
    prompts = [words(30 + i, 20 + 9 * i) for i in range(8)]
    many = engine_for(folder, max_num_seqs=8)
    want = [result.token_ids for result in many.generate(prompts, GREEDY)]
    many.close()
    few = engine_for(folder, max_num_seqs=8)
    few.use(few.ready.__class__(**{f: getattr(few.ready, f) for f in few.ready.__struct_fields__} | {"num_states": 5}))
    assert few.scheduler.max_running == 2
    assert [result.token_ids for result in few.generate(prompts, GREEDY)] == want
    few.close()


@pytest.mark.parametrize("limit", [3, 30])
def test_a_step_in_parts_passes_each_token_once(folder, limit):
    """Prompts that come one after another, so that no request with a state updated in place is in the failing step."""
    prompts, results = [words(40 + i, length) for i, length in enumerate((40, 5))], []
    for limited in (False, True):
        engine = engine_for(folder, max_num_seqs=1)
        if limited:
            tried = limit_tokens(engine, limit)
        results.append([engine.generate([prompt], GREEDY)[0] for prompt in prompts])
        engine.close()
    assert max(tried) > limit >= min(tried)
    assert all(result.error is None for result in results[1])
    assert [result.token_ids for result in results[1]] == [result.token_ids for result in results[0]]


def test_a_state_that_was_updated_in_place_is_not_updated_again(folder):
    """A prompt joins requests that generate, and their step runs out of memory after states have changed."""
    prompts = [words(50 + i, length) for i, length in enumerate((20, 21, 300))]
    engine = engine_for(folder)
    want = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine.close()
    engine = engine_for(folder)
    limit_tokens(engine, 60)
    results = engine.generate(prompts, GREEDY)
    again = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine.close()
    assert again == want
    for result, tokens in zip(results, want):
        if result.error is None:
            assert result.token_ids == tokens
        else:
            assert "recurrent state" in result.error and result.token_ids == tokens[: len(result.token_ids)]
    assert results[2].error is None and any(result.error for result in results)
