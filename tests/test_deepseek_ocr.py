"""The DeepSeek-OCR family through the engine: tokens and log-probabilities equal the reference's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from quire.engine.messages import SamplingParams
from tests import deepseek_ocr_reading as reading
from tests.families import judge
from tests.in_process import InProcessEngine
from tests.ocr_models import build_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)


class Reading:
    """The plain reading of DeepSeek-OCR, called as a model of transformers."""

    def __init__(self, folder):
        self.tensors = reading.write_checkpoint(folder)

    def __call__(self, token_ids, pages=()):
        return SimpleNamespace(logits=reading.logits(self.tensors, token_ids[0].tolist(), list(pages))[None])


@pytest.fixture(params=["deepseek_ocr", "deepseek_ocr2"])
def model(request, tmp_path):
    return Reading(tmp_path) if request.param == "deepseek_ocr" else build_model(request.param, tmp_path)


def check(model, prompt, result, **images) -> None:
    assert result.error is None and len(result.token_ids) == GREEDY.max_tokens
    wrong, error = judge(
        lambda ids: model(ids, **images), prompt, result.token_ids, [entry.logprobs[0] for entry in result.logprobs]
    )
    assert (wrong, error < 1e-3) == (0, True), error


def test_text(model, tmp_path):
    rng = random.Random(0)
    prompts = [[rng.randrange(11, 250) for _ in range(length)] for length in (1, 7, 40)]
    engine = InProcessEngine(str(tmp_path), max_model_len="200", max_num_batched_tokens=16)
    results = engine.generate(prompts, GREEDY)
    engine.close()
    for prompt, result in zip(prompts, results):
        check(model, prompt, result)
