"""Drafts for rows with LoRA adapters: tokens and log-probabilities are those without drafts."""

from __future__ import annotations

import msgspec
import pytest

from tests.helpers.models.lora import make_adapter, use
from tests.worker.sampling.test_speculation import FORCED, Adversary, engine_of, requests


@pytest.mark.slow
def test_drafts_of_rows_with_adapters(checkpoint, tmp_path):
    """Several adapters, scaled ones, rows with two and with none in steps that verify right and wrong drafts."""
    folder = checkpoint("llama3")
    one, two = (make_adapter(tmp_path / str(rank), folder, rank, seed=rank) for rank in (4, 16))
    engine = engine_of(folder, speculative_config=FORCED, enable_lora=True)
    prompts, sampling = requests()
    adapters = [[use(one)], [], [use(two)], [use(one, 0.5)], [use(two), use(one)], [], [use(two)], [use(one)], []]
    without = [msgspec.structs.replace(each, speculation=False) for each in sampling]
    plain = engine.generate(prompts, without, adapters=adapters)
    texts = [prompt + result.token_ids for prompt, result in zip(prompts, plain)]
    engine.executor._worker.runner.speculator.drafters = [Adversary(texts)]
    engine.scheduler.flush_stats()
    drafted = engine.generate(prompts, sampling, adapters=adapters)
    for i, (a, b) in enumerate(zip(plain, drafted)):
        assert a.error is None and a.token_ids == b.token_ids, i
        values = [[entry.logprobs for entry in one.logprobs] for one in (a, b)]
        assert [pytest.approx(each, abs=1e-3) for each in values[0]] == values[1], i
    assert sum(engine.scheduler.flush_stats().accepted_per_position) > 20
    base = engine.generate(prompts, without)
    assert all((a.token_ids == b.token_ids) == (not uses) for a, b, uses in zip(plain, base, adapters) if a.logprobs)
    engine.close()
