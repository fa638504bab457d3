"""`--cache-reuse`: runs of tokens at other positions are copied with rotated keys."""

from __future__ import annotations

import functools
import random

import pytest

from quire.engine.messages import SamplingParams
from tests.families import VOCAB, build_family
from tests.in_process import InProcessEngine

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
BLOCK, LEAST = 16, 24
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def start(folder: str, least: int = LEAST, **settings) -> InProcessEngine:
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": "512"}
    engine = InProcessEngine(folder, **sizes | {"cache_reuse": least} | settings)
    if least:
        engine.scheduler.contents.open_slots(engine.executor.slots, 0, least)
    return engine


class Reused:
    """Remembers how many tokens each request reused."""

    def __init__(self, engine: InProcessEngine):
        self.counts: list[int] = []
        finish = engine.scheduler._finish

        def noted(request, *args, **fields):
            self.counts.append(request.num_reused_tokens)
            return finish(request, *args, **fields)

        engine.scheduler._finish = noted


def conversation(seed: int) -> tuple[list[list[int]], list[int]]:
    """Parts of a prompt, and new tokens."""
    rng = random.Random(seed)
    parts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (37, 11, 70, 5, 50)]
    return parts, [rng.randrange(3, VOCAB) for _ in range(9)]


@pytest.mark.parametrize(
    "config", [{}, {"rope_parameters": YARN}, {"head_dim": 32}], ids=["default", "yarn", "larger heads"]
)
def test_a_shift_is_exact_where_keys_depend_on_their_tokens_alone(tmp_path, config):
    """In a model of one layer: its keys and values were not computed from what the tokens attended to."""
    folder = build_family("arcee", tmp_path / "model", num_hidden_layers=1, **config)
    (begin, dropped, kept, other, last), new = conversation(1)
    prompt = [*begin, *kept, *last, *new]
    plain = start(folder, 0)
    expected = plain.generate([prompt], GREEDY)[0]
    plain.close()
    engine = start(folder)
    reused = Reused(engine)
    engine.generate([[*begin, *dropped, *kept, *other, *last, *new[:2], 7, 7]], GREEDY)
    result = engine.generate([prompt], GREEDY)[0]
    assert result.num_cached_tokens == 32
    assert reused.counts[1] == 5 + 70 + 50 + 2  # the rest of the first part, and both runs
    assert result.token_ids == expected.token_ids
    for ours, theirs in zip(result.logprobs, expected.logprobs, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
    engine.close()


def test_the_next_turn_reuses_it_again_and_no_other_prompt_finds_it(tmp_path):
    folder = build_family("arcee", tmp_path / "model", num_hidden_layers=1)
    (begin, dropped, kept, _, last), new = conversation(2)
    engine = start(folder)
    reused = Reused(engine)
    engine.generate([[*begin, *dropped, *kept, *last]], GREEDY)
    prompt = [*begin, *kept, *last]
    answer = engine.generate([prompt], GREEDY)[0].token_ids
    turn = engine.generate([[*prompt, *answer, *new]], GREEDY)[0]
    assert turn.num_cached_tokens == 32 and reused.counts[2] >= 5 + 70 + 32
    pool = engine.scheduler.kv.pool
    exact = set(pool._by_hash)
    plain = start(folder, 0)
    expected = plain.generate([[*prompt, *answer, *new]], GREEDY)[0]
    assert turn.token_ids == expected.token_ids
    probes = set(plain.scheduler.kv.pool._by_hash)  # of the exact prefix
    assert len(exact & probes) == 2  # its first two blocks, which were computed
    plain.close()
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deeper_models_are_near_what_is_computed(tmp_path, dtype):
    folder = build_family("arcee", tmp_path / "model")
    (begin, dropped, kept, other, last), new = conversation(3)
    prompt = [*begin, *kept, *last, *new]
    plain = start(folder, 0, dtype=dtype)
    expected = plain.generate([prompt], GREEDY)[0]
    plain.close()
    engine = start(folder, dtype=dtype)
    reused = Reused(engine)
    engine.generate([[*begin, *dropped, *kept, *other, *last]], GREEDY)
    result = engine.generate([prompt], GREEDY)[0]
    assert reused.counts[1] > 100
    first, theirs = result.logprobs[0], expected.logprobs[0]
    assert dict(zip(first.token_ids, first.logprobs))[first.token_ids[0]] == pytest.approx(theirs.logprobs[0], abs=0.5)
    engine.close()


def test_runs_that_are_too_short_or_of_another_salt_are_computed(tmp_path):
    folder = build_family("arcee", tmp_path / "model", num_hidden_layers=1)
    (begin, dropped, kept, _, last), new = conversation(4)
    engine = start(folder)
    reused = Reused(engine)
    engine.generate([[*begin, *dropped, *kept, *last]], GREEDY)
    engine.generate([[*begin, *kept[:20], *new, *kept[20:40], *new]], GREEDY)
    engine.generate([[*new, *kept, *last]], GREEDY)  # begins with other tokens: a run must follow the prefix
    assert reused.counts[1] == 0
    engine.close()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma3", {}, "Gemma3ForCausalLM is not one of"),
        ("qwen3_5", {}, "is not one of"),
        ("arcee", {"kv_cache_dtype": "int8"}, "8 bits per entry"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, family, settings, message):
    folder = build_family(family, tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        start(folder, **settings)


def _chat(text: str) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": False}


ANSWERS = [  # a route, its body, and where the answer says what was reused
    ("/v1/chat/completions", _chat, ["usage"]),
    ("/v1/responses", lambda text: {"model": "m", "input": text, "max_output_tokens": 16}, ["usage"]),
    ("/v1/messages", _chat, ["usage"]),
    ("/api/chat", lambda text: _chat(text) | {"options": {"num_predict": 2}}, []),
    ("/api/generate", lambda text: {"model": "m", "prompt": text, "stream": False, "options": {"num_predict": 2}}, []),
    ("/generate", lambda text: {"text": text, "sampling_params": {"max_new_tokens": 2}}, ["meta_info"]),
    ("/generate", lambda text: {"inputs": text, "parameters": {"max_new_tokens": 2, "details": True}}, ["details"]),
]


@pytest.mark.slow
def test_usage_says_how_many_tokens_were_reused():
    from quire.configs.sources import EMBEDDED_MODEL
    from tests.server.conftest import running_server

    sizes = {"kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK, "served_model_name": ["m"]}
    (begin, dropped, kept, _, last), _ = conversation(6)
    with running_server(
        str(EMBEDDED_MODEL), distributed_executor_backend="uniproc", cache_reuse=LEAST, **sizes
    ) as server:
        server.wait_ready(120)

        def usage(prompt: list[int]) -> dict:
            body = {"model": "m", "prompt": prompt, "max_tokens": 2}
            return server.http.post("/v1/completions", json=body).json()["usage"]

        first = usage([*begin, *dropped, *kept, *last, *[5] * BLOCK])
        assert "reused_tokens" not in first
        second = usage([*begin, *kept, *last, 6])
        assert second["prompt_tokens_details"]["cached_tokens"] == 32
        assert second["reused_tokens"] == 5 + 70 + 50
        for i, (route, body, path) in enumerate(ANSWERS):
            head, tail = f"{i} begins. " + "The cat sat on the mat. " * 4, "Then the dog ran to the old house. " * 6
            for text in (head + "This sentence is dropped. " + tail, head + tail):
                answer = server.http.post(route, json=body(text))
                assert answer.status_code == 200, answer.text
            found = functools.reduce(lambda part, name: part[name], path, answer.json())
            assert found["reused_tokens"] > LEAST, (route, found)
