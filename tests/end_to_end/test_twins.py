"""Families that transformers has not against the published formulas (`tests/helpers/twins.py`)."""

from __future__ import annotations

import random

import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.worker.models.registry import read_model_spec
from tests.end_to_end.test_families import small_engine
from tests.helpers.models.judges import judge
from tests.helpers.twins import TWINS, VOCAB, build_twin, load_twin
from tests.worker.models.test_family_ranks import Pipeline, over_ranks
from tests.worker.test_tensor_parallel import build, logits_of

LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 24, 25, 33, 47, 64, 65, 90, 128, 200]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_tokens_and_logprobs_equal_the_formula(name, tmp_path):
    """Ragged prompts at once under chunked prefill, and again with prefix hits."""
    engine, rng = small_engine(build_twin(name, tmp_path)), random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    first, again = engine.generate(prompts, sampling), engine.generate(prompts[::-1], sampling)[::-1]
    engine.close()
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    twin = load_twin(name, tmp_path)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judge(twin, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: {wrong} wrong, error {error}"


@pytest.mark.parametrize("name", TWINS)
def test_two_ranks_agree_with_one(name, tmp_path):
    folder = build_twin(name, tmp_path)
    expected, has_experts = logits_of(build(folder)), any(layer.moe for layer in read_model_spec(folder).layers)
    for expert_parallel in {False, has_experts}:
        for logits in over_ranks(folder, expert_parallel):
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits_of(Pipeline(folder)), expected, atol=1e-5, rtol=0)
