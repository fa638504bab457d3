"""Random requests with random adapters, few slots and little memory, with aborts: every text is that of its adapter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.messages import AddRequest, SamplingParams
from tests.helpers.models.checkpoints import TOKENIZER_SIZE, greedy
from tests.helpers.models.lora import make_adapter, merged, use
from tests.worker.lora.test_lora import engine_for

SHORT = {"max_model_len": "32"}
NUM_ADAPTERS, NUM_TOKENS, LENGTHS = 4, 5, (3, 9, 22)


@pytest.fixture(scope="module")
def world(checkpoint, tmp_path_factory):
    """(an engine, the adapters, the expected tokens by adapter (-1: none) and prompt, the prompts)."""
    folder = checkpoint("llama-tied")
    base = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(base / str(i), folder, 2 + 3 * i, seed=i) for i in range(NUM_ADAPTERS)]
    rng = random.Random(0)
    prompts = [[rng.randrange(4, TOKENIZER_SIZE) for _ in range(length)] for length in LENGTHS]
    models = {-1: merged(folder)} | {i: merged(folder, (one, 1.0)) for i, one in enumerate(adapters)}
    tokens = {(i, p): greedy(model, prompts[p], NUM_TOKENS)[0] for i, model in models.items() for p in range(3)}
    engine = engine_for(folder, num_gpu_blocks_override=20, max_loras=2, max_cpu_loras=2, max_num_seqs=4, **SHORT)
    yield engine, adapters, tokens, prompts
    engine.close()


REQUESTS = st.lists(
    st.tuples(st.integers(-1, NUM_ADAPTERS - 1), st.integers(0, 2), st.none() | st.integers(1, 12)),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(requests=REQUESTS, unloads=st.lists(st.integers(0, NUM_ADAPTERS - 1), max_size=3))
def test_every_request_has_its_adapter(world, requests, unloads):
    """A request is (adapter, prompt, the step after which it is aborted). Adapters are unloaded in between."""
    engine, adapters, expected, prompts = world
    scheduler, params = engine.scheduler, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    found, aborts = {str(i): [] for i in range(len(requests))}, {}
    for i, (adapter, prompt, aborted) in enumerate(requests):
        uses = [use(adapters[adapter])] if adapter >= 0 else []
        scheduler.add(AddRequest(str(i), prompts[prompt], params, adapters=uses))
        if aborted is not None:
            aborts.setdefault(aborted, []).append(str(i))
    number, aborted = 0, set()
    while step := scheduler.schedule():
        number += 1
        for batch in scheduler.update(step, engine.executor.execute(step.input).result()).values():
            for output in batch:
                assert output.error is None
                found[output.request_id] += output.new_token_ids
        if gone := aborts.get(number):
            scheduler.abort(gone)
            aborted.update(gone)
        if number <= len(unloads):
            engine.executor._worker.unload_lora(use(adapters[unloads[number - 1]]).key)
        loaded = engine.executor._worker.runner.adapters._loaded
        assert len(loaded) <= 2
    assert scheduler.kv.usage == 0 and not scheduler.requests
    for i, (adapter, prompt, _) in enumerate(requests):
        want = expected[adapter, prompt]
        assert found[str(i)] == want[: len(found[str(i)])]
        assert str(i) in aborted or len(found[str(i)]) == NUM_TOKENS


@pytest.mark.slow
def test_many_adapters_and_none_in_one_batch(checkpoint, tmp_path):
    """Thirty-two adapters and a request without one run in the same steps."""
    folder = checkpoint("llama-tied")
    adapters = [make_adapter(tmp_path / str(i), folder, 1 + i % 5, seed=i) for i in range(32)]
    engine = engine_for(folder, max_loras=32, max_num_seqs=40, num_gpu_blocks_override=300, max_num_batched_tokens=256)
    prompt = [5, 6, 7, 8, 9, 10]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    results = engine.generate([prompt] * 33, params, adapters=[[use(one)] for one in adapters] + [[]])
    assert len(engine.executor._worker.runner.adapters.step.active) == 32
    engine.close()
    models = [*(merged(folder, (one, 1.0)) for one in adapters), merged(folder)]
    for result, model in zip(results, models, strict=True):
        assert result.token_ids == greedy(model, prompt, 3)[0]
