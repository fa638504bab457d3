"""Every family against transformers: ragged prompts at once in float32, chunked prefill, preemption, prefix hits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.engine.messages import SamplingParams
from quire.worker.cache.spec import plan_cache
from quire.worker.messages import most_blocks
from quire.worker.models import read_model_spec
from quire.worker.models.config import cache_specs
from tests.families import FAMILIES, VOCAB, build_family, judge, load_family
from tests.in_process import InProcessEngine

NUM_TOKENS = 20
LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 25, 32, 33, 47, 64, 65, 90, 100, 127, 128, 200, 333, 600, 700]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def small_engine(folder: str, **settings: Any) -> InProcessEngine:
    """An engine whose pool holds little more than the longest request, so that running requests are preempted."""
    groups = plan_cache(cache_specs(read_model_spec(folder), 4)).groups
    return InProcessEngine(
        folder,
        block_size=4,
        num_gpu_blocks_override=most_blocks(groups, 720, 4, 64) + 4,
        max_num_batched_tokens=64,
        max_num_seqs=24,
        max_model_len="720",
        **settings,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path):
    folder = build_family(name, tmp_path)
    engine = small_engine(folder)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    first = engine.generate(prompts, sampling)
    again = engine.generate(prompts[::-1], sampling)[::-1]
    engine.close()
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    reference = load_family(folder)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            assert result.finish_reason == "length" and result.error is None
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judge(reference, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: {wrong} wrong, error {error}"
