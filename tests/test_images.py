"""Models that read images through the engine: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.engine.messages import SamplingParams
from tests.families import judge
from tests.image_prompts import Prompt, Reference, Writer, build, picture
from tests.in_process import InProcessEngine, Result

NAMES = ["llava", "pixtral", "mistral3", "internvl", "qwen2_5_vl", "qwen3_vl", "gemma3"]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)
SMALL = {"block_size": 4, "max_model_len": "400", "max_num_seqs": 8}


def workload(write: Writer) -> list[Prompt]:
    """Text, one image and several, at the start, next to each other, and one image in two prompts."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(30, 250) for _ in range(length)]

    a, b, c = picture(0, 40, 30), picture(1, 25, 61), picture(2, 90, 31)
    return [
        write(*text(33)),
        write(*text(5), a, *text(7)),
        write(b, *text(3)),
        write(*text(9), a, *text(2), c, *text(4), b, *text(11)),
        write(*text(3), c, 31, c, *text(20)),
        write(*text(2)),
    ]


def check(name: str, model: Any, prompts: list[Prompt], results: list[Result]) -> None:
    for prompt, result in zip(prompts, results):
        assert result.error is None and len(result.token_ids) == GREEDY.max_tokens
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        reference = Reference(name, model, prompt.images)
        wrong, error = judge(reference, prompt.token_ids, result.token_ids, logprobs)
        assert (wrong, error < 1e-3) == (0, True), f"{len(prompt.images)} images: {wrong} wrong, error {error}"


def run(folder: Path, prompts: list[Prompt], **settings: Any) -> list[Result]:
    engine = InProcessEngine(str(folder), **SMALL | settings)
    results = generate(engine, prompts)
    engine.close()
    return results


def generate(engine: InProcessEngine, prompts: list[Prompt], sampling: SamplingParams = GREEDY) -> list[Result]:
    return engine.generate([one.token_ids for one in prompts], sampling, media=[one.media for one in prompts])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_equal_transformers(name, tmp_path):
    model = build(name, tmp_path)
    prompts = workload(Writer(tmp_path, tmp_path))
    check(name, model, prompts, run(tmp_path, prompts))
