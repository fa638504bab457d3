"""Adapters as `peft` itself computes them, where it is installed."""

from __future__ import annotations

import pytest

from tests.helpers.models.checkpoints import load_reference
from tests.helpers.models.lora import make_adapter, make_expert_adapter, use
from tests.worker.lora.test_lora import GREEDY, check, engine_for, prompts  # noqa: F401 - a fixture

peft = pytest.importorskip("peft")


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("llama3", make_adapter, {"rank": 4}),
        ("qwen2", make_adapter, {"rank": 16, "use_rslora": True}),
        ("qwen3", make_adapter, {"rank": 8, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 5}}),
        ("qwen3-moe", make_expert_adapter, {"stacked": True}),
    ],
    ids=["dense", "biases", "patterns", "experts"],
)
def test_greedy_tokens_and_logprobs(name, make, options, checkpoint, tmp_path, prompts):  # noqa: F811
    folder = checkpoint(name)
    adapter = make(tmp_path / "one", folder, **options)
    reference = peft.PeftModel.from_pretrained(load_reference(folder), str(adapter)).eval()
    engine = engine_for(folder)
    results = engine.generate(prompts[2:4], GREEDY, adapters=[[use(adapter)]] * 2)
    engine.close()
    check(results, prompts[2:4], [reference] * 2)
