"""The DeepSeek-OCR family through the engine: tokens and log-probabilities equal the reference's."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models import deepseek_ocr_reading as reading
from tests.helpers.models.image_prompts import PREPROCESSORS, Prompt, Reference, Writer, build, picture
from tests.helpers.models.judges import judge
from tests.helpers.models.ocr_models import build_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)


class Reading:
    """The plain reading of DeepSeek-OCR, called as a model of transformers. It never writes the image token."""

    def __init__(self, folder):
        self.tensors = reading.write_checkpoint(folder)
        self.tensors["lm_head.weight"][reading.IMAGE_TOKEN_ID] = 0.0
        save_file(self.tensors, folder / "model.safetensors")

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


def prompts_of(write: Writer) -> list[Prompt]:
    """Text, a page with tiles in front, and small pages among text."""
    large, small = picture(0, 130, 200), picture(1, 60, 40)
    return [write(20, 21, 22), write(large, 23, 24), write(20, small, 21, picture(2, 50, 64), 22), write(25, small)]


def run(folder, prompts: list[Prompt], sampling: SamplingParams = GREEDY, **settings) -> list[Result]:
    engine = InProcessEngine(str(folder), max_model_len="800", max_num_batched_tokens=64, **settings)
    results = engine.generate([one.token_ids for one in prompts], sampling, media=[one.media for one in prompts])
    engine.close()
    return results


def test_pages(tmp_path):
    """From pictures to tokens, against the plain reading; a step has fewer tokens than some pages."""
    model = Reading(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS["unlimited_ocr"]))
    prompts = prompts_of(Writer(tmp_path, tmp_path))
    assert any("grid" in image.features for image in prompts[1].images)
    for prompt, result in zip(prompts, run(tmp_path, prompts)):
        pages = [{key: torch.from_numpy(value) for key, value in one.features.items()} for one in prompt.images]
        check(model, prompt.token_ids, result, pages=pages)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unlimited_ocr", "deepseek_ocr2"])
def test_pages_equal_transformers(name, tmp_path):
    """The window of Unlimited-OCR's outputs is longer than the answers here; see test_output_window.py."""
    model = build(name, tmp_path)
    prompts = prompts_of(Writer(tmp_path, tmp_path))
    for prompt, result in zip(prompts, run(tmp_path, prompts)):
        check(Reference(name, model, prompt.images), prompt.token_ids, result)
