"""Unlimited-OCR's outputs, whose tokens attend to the prompt and to the last tokens of the output: greedy tokens and
log-probabilities are those of transformers' `generate`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.image_prompts import PREPROCESSORS, Reference, Writer, picture
from tests.helpers.models.ocr_models import build_model

WINDOW, LENGTH = 5, 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlimited")
    return str(folder), build_model("unlimited_ocr", folder, sliding_window=WINDOW)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(30, 250) for _ in range(length)] for length in (1, 3, 7, 20, 41)]


@torch.inference_mode()
def reference(model, prompt: list[int], **images: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the log-probabilities `[LENGTH, V]` from which they were chosen."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **images,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).float().log_softmax(-1)


def check(model, prompt: list[int], result, **images: Any) -> None:
    tokens, logprobs = reference(model, prompt, **images)
    assert result.error is None and len(result.token_ids) == LENGTH
    for i, (mine, theirs) in enumerate(zip(result.token_ids, tokens)):
        assert abs(result.logprobs[i].logprobs[0] - logprobs[i, mine].item()) < 1e-3
        if mine != theirs:
            best = logprobs[i].topk(2).values
            assert best[0] - best[1] < 1e-3  # a tie, after which the texts differ
            return


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [200, 36])
def test_outputs_are_those_of_transformers(model, num_blocks):
    """All at once; also with so few blocks that requests are preempted and computed again."""
    folder, theirs = model
    engine = InProcessEngine(
        folder, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, num_gpu_blocks_override=num_blocks,
        max_model_len="80",
    )  # fmt: skip
    results = engine.generate(prompts(), GREEDY)
    engine.close()
    for prompt, result in zip(prompts(), results):
        check(theirs, prompt, result)
    assert any(result.num_preemptions for result in results) is (num_blocks == 36)


@pytest.mark.slow
def test_pages(model, tmp_path):
    """Of prompts with images the whole prompt stays visible, too."""
    folder, theirs = model
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS["unlimited_ocr"]))
    write = Writer(folder, tmp_path)
    written = [write(20, picture(1, 60, 40), 21, 22), write(picture(0, 130, 200), 23)]
    engine = InProcessEngine(folder, block_size=4, max_num_batched_tokens=64, max_model_len="800")
    results = engine.generate([one.token_ids for one in written], GREEDY, media=[one.media for one in written])
    engine.close()
    for prompt, result in zip(written, results):
        check(theirs, prompt.token_ids, result, **Reference("unlimited_ocr", theirs, prompt.images).inputs)


def test_an_8_bit_cache(model):
    """Close to the tokens of the model's type; the keys of outputs lie next to their scales."""
    folder, theirs = model
    engine = InProcessEngine(folder, block_size=4, kv_cache_dtype="int8")
    (result,) = engine.generate(prompts()[3:4], GREEDY)
    engine.close()
    tokens, logprobs = reference(theirs, prompts()[3])
    same = next((i for i, (a, b) in enumerate(zip(result.token_ids, tokens)) if a != b), LENGTH)
    assert same > WINDOW
    assert all(abs(result.logprobs[i].logprobs[0] - logprobs[i, tokens[i]].item()) < 0.2 for i in range(same))


def test_an_output_is_not_found_as_the_prefix_of_a_prompt(model):
    """Its keys depend on where the prompt ended."""
    folder, theirs = model
    engine = InProcessEngine(folder, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    first = prompts()[3]
    (answer,) = engine.generate([first], GREEDY)
    longer = [*first, *answer.token_ids]
    (result,) = engine.generate([longer], GREEDY)
    check(theirs, longer, result)
    assert 0 < result.num_cached_tokens <= len(first)
    engine.close()
