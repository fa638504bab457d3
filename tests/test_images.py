"""Models that read images through the engine: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.engine.messages import SamplingParams
from quire.worker.cache.spec import plan_cache
from quire.worker.cpu import build as native_build
from quire.worker.messages import most_blocks
from quire.worker.models import read_model_spec
from quire.worker.models.config import cache_specs
from tests.families import judge
from tests.image_prompts import Prompt, Reference, Writer, build, picture
from tests.in_process import InProcessEngine, Result

pytestmark = pytest.mark.slow

NAMES = ["llava", "pixtral", "mistral3", "internvl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4-large"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)
SMALL = {"block_size": 4, "max_model_len": "400", "max_num_seqs": 8}
CHUNKS = {"gemma4-large": 80}  # tokens of a step, fewer than some images have unless they are computed whole


def workload(write: Writer, seed: int = 0) -> list[Prompt]:
    """Text, one image and several, at the start, next to each other, and one image in two prompts."""
    rng = random.Random(seed)

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
        write(*text(8), b),
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


def tight_engine(name: str, folder: Path, prompts: list[Prompt], **settings: Any) -> InProcessEngine:
    """Its blocks hold little more than the longest request, and its steps fewer tokens than some images have."""
    longest, chunk = max(len(prompt.token_ids) for prompt in prompts) + GREEDY.max_tokens, CHUNKS.get(name, 26)
    num_blocks = most_blocks(plan_cache(cache_specs(read_model_spec(str(folder)), 4)).groups, longest, 4, chunk) + 1
    tight = {"num_gpu_blocks_override": num_blocks, "max_model_len": str(longest), "max_num_batched_tokens": chunk}
    return InProcessEngine(str(folder), **SMALL | tight | settings)


def generate(engine: InProcessEngine, prompts: list[Prompt], sampling: SamplingParams = GREEDY) -> list[Result]:
    return engine.generate([one.token_ids for one in prompts], sampling, media=[one.media for one in prompts])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_equal_transformers(name, tmp_path):
    """Also in chunks that cut images, after preemption, and with prefix hits that end in images and after them."""
    model = build(name, tmp_path)
    write = Writer(tmp_path, tmp_path)
    prompts = workload(write)
    check(name, model, prompts, run(tmp_path, prompts))
    prompts = workload(write, 1) + prompts
    engine = tight_engine(name, tmp_path, prompts, steps_in_flight=2)
    first = generate(engine, prompts)
    again = generate(engine, prompts[::-1])[::-1]
    generate(engine, prompts[-1:])
    last = generate(engine, prompts[-1:])  # ends with an image
    engine.close()
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    item = prompts[-1].media[0]
    inside = item.offset < last[0].num_cached_tokens < item.offset + item.length
    assert inside != engine.ready.media.whole
    for results in (first, again):
        check(name, model, prompts, results)
    check(name, model, prompts[-1:], last)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4-large", "pixtral", "internvl", "llava"])
def test_bfloat16(name, tmp_path, _kernels_in_the_cache):
    """The native kernels give about the reference's log-probabilities and, with `deterministic`, the same bits alone
    and among others, in one chunk and in several.
    """
    if native_build.cpu_level() is None or native_build.compiler() is None:
        pytest.skip("no native kernels here")
    model = build(name, tmp_path, "bfloat16")
    prompts = workload(Writer(tmp_path, tmp_path))
    wide = name.startswith(("qwen3", "gemma"))  # heads as wide as the native attention needs
    engine = tight_engine(name, tmp_path, prompts, dtype="bfloat16", deterministic=wide)
    crowd = generate(engine, prompts)
    assert engine.executor._worker.runner.platform.ops.name == "native"
    engine.close()
    for prompt, result in zip(prompts, crowd):
        assert result.error is None
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        wrong, error = judge(Reference(name, model, prompt.images), prompt.token_ids, result.token_ids, logprobs, 0.6)
        assert (wrong, error < 0.5) == (0, True), f"{len(prompt.images)} images: {wrong} wrong, error {error}"
    if wide:
        settings = {"dtype": "bfloat16", "deterministic": True, "enable_prefix_caching": False}
        engine = InProcessEngine(str(tmp_path), **SMALL | settings)
        alone = [generate(engine, [prompt])[0] for prompt in prompts]
        engine.close()
        assert [one.logprobs for one in alone] == [one.logprobs for one in crowd]
