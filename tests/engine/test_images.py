"""Prompts with images through the real engine loop: any schedule gives what each request gets alone, images are encoded
within the limits, and requests share blocks only if their images are the same.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.encoder_cache import EncoderCache
from quire.engine.messages import Choice, MediaItem, SamplingParams
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import CLIENT, VOCAB, Engine, Idle, assert_invariants, fake_config

IMAGE = 9  # the image token id
MAX_MODEL_LEN = 96


def item(key: str, offset: int, length: int, num_embeds: int | None = None) -> MediaItem:
    return MediaItem(key, offset, length, length if num_embeds is None else num_embeds, f"/{key}")


def engine_with(images: str, mix: str = "full", **configuration) -> Engine:
    with mock.patch.dict(os.environ, {"FAKE_EXECUTOR": f"images={images},groups={mix}"}):
        return Engine(fake_config(max_model_len=str(MAX_MODEL_LEN), **configuration))


def prompt_of(*parts: int | tuple[str, int]) -> tuple[list[int], list[MediaItem]]:
    """Token ids, and images as (key, number of tokens)."""
    prompt, media = [], []
    for part in parts:
        if isinstance(part, tuple):
            media.append(item(part[0], len(prompt), part[1]))
            prompt += [IMAGE] * part[1]
        else:
            prompt.append(part)
    return prompt, media


def expected(prompt, media, num_tokens, **sampling):
    return expected_tokens(prompt, SamplingParams(max_tokens=num_tokens, **sampling), MAX_MODEL_LEN, VOCAB, media=media)


# an image's key determines its size
SIZES = {"a": 3, "b": 3, "c": 7, "d": 12, "e": 1}


@st.composite
def workload(draw):
    """Requests as (turn of arrival, prompt, images, sampling, number of siblings, turn of the abort or None)."""
    stems = [draw(st.lists(part, min_size=1, max_size=6)) for _ in range(draw(st.integers(1, 3)))]
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        parts = draw(st.sampled_from(stems)) + draw(st.lists(part, max_size=2))
        prompt, media = prompt_of(*parts)
        sampling = SamplingParams(
            max_tokens=draw(st.integers(0, 12)),
            seed=draw(st.integers(0, 3)),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        if len(prompt) < MAX_MODEL_LEN - 20:
            abort = draw(st.one_of(st.none(), st.none(), st.integers(0, 40)))
            siblings = draw(st.sampled_from([0, 0, 2]))
            requests.append((draw(st.integers(0, 20)), prompt, media, sampling, siblings, abort))
    return requests


# text may contain the image token, too
part = st.one_of(st.integers(0, VOCAB - 1), st.just(IMAGE), st.sampled_from(list(SIZES.items())))
engine_settings = st.fixed_dictionaries(
    {
        "steps_in_flight": st.integers(1, 3),
        "pipeline_parallel_size": st.sampled_from([1, 1, 2]),
        "num_gpu_blocks_override": st.integers(30, 60),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(18, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "enable_prefix_caching": st.booleans(),
    }
)
limits = st.tuples(st.integers(12, 24), st.integers(1, 24), st.booleans())


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(engine_settings, st.sampled_from(["full", "full", "full+window:9", "window:5"]), limits, workload())
def test_any_schedule_gives_what_each_request_gets_alone(configuration, mix, limits, requests):
    size, budget, whole = limits
    configuration["num_gpu_blocks_override"] *= 1 + mix.count("+")
    engine = engine_with(f"{IMAGE}:{size}:{budget}" + whole * ":whole", mix, **configuration)
    drive(engine, requests)
    limit = engine.scheduler.max_model_len
    for i, (_, prompt, media, sampling, siblings, aborted) in enumerate(requests):
        for k in range(siblings + 1):
            outputs = engine.outputs.get((CLIENT, f"{i}.{k}"), [])
            tokens = [token for output in outputs for token in output.new_token_ids]
            seeded = SamplingParams(max_tokens=sampling.max_tokens, seed=sampling.seed + k)
            want = expected_tokens(prompt, seeded, limit, VOCAB, media=media)
            if aborted is not None and not (outputs and outputs[-1].finish_reason):
                assert tokens == want[: len(tokens)]
            elif len(prompt) + 1 > limit:
                assert outputs[-1].finish_reason == "error"
            else:
                assert (outputs[-1].finish_reason, outputs[-1].error, tokens) == ("length", None, want)
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
            _, prompt, media, sampling, siblings, _ = requests[i]
            if what == "abort":
                engine.abort(*(f"{i}.{k}" for k in range(siblings + 1)))
            else:
                others = [Choice(f"{i}.{k}", sampling.seed + k) for k in range(1, siblings + 1)]
                fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
                background = len(prompt) % 3 == 0
                engine.add(f"{i}.0", prompt, media=media, siblings=others, background=background, **fields)
        turn += 1
        try:
            engine.turn()
        except Idle:
            engine.collect()
        assert_invariants(engine)
        assert turn < 20_000


def hits(engine: Engine, request_id: str, prompt, media) -> int:
    engine.add(request_id, prompt, media=media, max_tokens=4)
    engine.run()
    assert engine.tokens(request_id) == expected(prompt, media, 4)
    return engine.last(request_id).counts.cached


def test_images_of_equal_size_never_share_blocks():
    engine = engine_with(f"{IMAGE}:64:64", block_size=4)
    first, second = prompt_of(1, 2, 3, 4, 5, ("a", 12), 6, 7, 8, 9, 10, 11), prompt_of(1, 2, 3, 4, 5, ("b", 12), 6, 7)
    assert first[0][:18] == second[0][:18]  # the token ids are equal
    assert hits(engine, "0", *first) == 0
    assert hits(engine, "1", *second) == 4, "the block before the image"
    assert hits(engine, "2", *first) == 20
    assert hits(engine, "3", first[0], []) == 4, "the same ids as text"
    shifted = [item("a", 6, 11)]
    assert hits(engine, "4", first[0], shifted) == 4, "the same image one token later"


def test_an_image_of_a_prefix_hit_is_not_encoded_and_one_that_is_kept_is_not_encoded_again():
    engine = engine_with(f"{IMAGE}:64:64", block_size=4)
    prompt, media = prompt_of(1, 2, 3, 4, ("a", 8), 5, 6, ("b", 8), 7)
    assert hits(engine, "0", prompt, media) == 0
    engine.scheduler.images.forget("a")
    other = prompt_of(1, 2, 3, 4, ("a", 8), 5, 6, ("c", 8), ("b", 8), 7)
    assert hits(engine, "1", *other) == 12
    assert set(engine.core.executor._images) == {"b", "c"}
    assert hits(engine, "2", *prompt_of(("a", 8), 5, 6)) == 0  # it is elsewhere
    assert set(engine.core.executor._images) == {"a", "b", "c"}


def test_a_prompt_waits_for_the_budget_and_decodes_run_on():
    """While images are encoded one per step, the other request gets a token in every step."""
    engine = engine_with(f"{IMAGE}:64:8", block_size=4, max_num_batched_tokens=64)
    engine.add("text", [1, 2, 3], max_tokens=12)
    engine.turn()
    prompt, media = prompt_of(1, ("a", 8), 2, ("b", 8), 3, ("c", 8), 4)
    engine.add("images", prompt, media=media, max_tokens=2)
    encoded = []
    execute = engine.core.executor.execute

    def record(step):
        encoded.append(([each.key for each in step.encode], len(step.samples)))
        return execute(step)

    engine.core.executor.execute = record
    engine.run()
    assert encoded[:4] == [(["a"], 1), (["b"], 1), (["c"], 2), ([], 2)]
    assert engine.tokens("images") == expected(prompt, media, 2)


def test_an_unreadable_image_fails_its_requests_alone():
    engine = engine_with(f"{IMAGE}:64:64", block_size=4, steps_in_flight=2)
    good, bad = prompt_of(1, ("a", 8), 2, 3), prompt_of(1, ("unreadable", 8), 2, 3)
    engine.add("text", [1, 2, 3], max_tokens=8)
    engine.add("bad", bad[0], media=bad[1], max_tokens=8)
    engine.add("good", good[0], media=good[1], max_tokens=8)
    engine.run()
    assert engine.last("bad").finish_reason == "error" and "unreadable" in engine.last("bad").error
    assert engine.tokens("text") == expected([1, 2, 3], [], 8) and engine.tokens("good") == expected(*good, 8)
    engine.add("again", bad[0], media=bad[1], max_tokens=8)  # it is tried again
    engine.run()
    assert engine.last("again").error
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("prompt", "media", "message"),
    [
        ([IMAGE] * 8, [item("a", 0, 9)], "misplaced"),
        ([IMAGE] * 8, [item("a", 4, 4), item("b", 0, 4)], "image 2.*misplaced"),
        ([IMAGE] * 8, [item("a", 0, 8, 7)], "7 embeddings, but 8 placeholders"),
        ([1] * 8, [item("a", 0, 8, 0)], "0 placeholders"),
        ([IMAGE] * 30, [item("a", 0, 30)], "30 tokens, but may have at most 20: send a smaller image"),
        ([IMAGE] * 18, [item("a", 0, 18)], "18 tokens, but may have at most 17.*max-num-batched-tokens"),
    ],
)
def test_images_that_do_not_fit_are_refused(prompt, media, message):
    engine = engine_with(f"{IMAGE}:20:20:whole", max_num_batched_tokens=24, max_num_seqs=8)
    engine.add("0", prompt, media=media)
    engine.run()
    (output,) = engine.outputs[CLIENT, "0"]
    assert output.error_kind == "invalid_request"
    with pytest.raises(ValueError, match=message):
        raise ValueError(output.error)


def test_a_model_without_images_refuses_them():
    engine = Engine(fake_config())
    engine.add("0", [IMAGE], media=[item("a", 0, 1)])
    engine.run()
    assert "does not read images" in engine.last("0").error


def test_the_least_recently_used_image_that_no_request_holds_makes_room():
    cache = EncoderCache(size=10, budget=10)

    def step(*items):
        cache.start_step()
        found = [cache.request(each) for each in items]
        encode, evict = cache.take_step()
        return found, [each.key for each in encode], evict

    a, b, c, d = item("a", 0, 4), item("b", 0, 4), item("c", 0, 4), item("d", 0, 6)
    holder = object()
    assert step(a, b, c) == ([True, True, False], ["a", "b"], [])
    assert step(a) == ([True], [], [])
    assert step(c) == ([True], ["c"], ["b"])
    cache.hold("a", holder)
    assert step(d) == ([True], ["d"], ["c"])
    assert step(b) == ([True], ["b"], ["d"])
    cache.release("a", holder)
    cache.forget("b")
    assert step(b) == ([True], ["b"], ["b"]) and len(cache) == 2 and cache.num_used == 8
