"""Models that read videos through the engine: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.server.media.video.sources import Clip
from quire.worker.messages import most_blocks
from quire.worker.models.registry import read_model_spec
from quire.worker.spec.cache import plan_cache
from quire.worker.spec.model import cache_specs
from tests.end_to_end.test_images import GREEDY, SMALL, generate, run
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.films import film
from tests.helpers.models.image_prompts import build, picture
from tests.helpers.models.judges import judge
from tests.helpers.models.lora import use, write_adapter
from tests.helpers.models.qwen_gemma_models import VIDEO_TOKEN_ID
from tests.helpers.models.video_prompts import (
    Video,
    VideoFile,
    VideoPrompt,
    VideoReference,
    VideoWriter,
    published_positions,
)

pytestmark = pytest.mark.slow

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen4_exp", "internvl"]
# pixels of a frame (Qwen2-VL, Qwen2.5-VL: squares of 8 x 8 are tokens), or of all frames
LIMITS = {"qwen3": {"size": {"shortest_edge": 64, "longest_edge": 64 * 90}}, "qwen2": {"max_pixels": 64 * 20}}


def built(name: str, folder: Path) -> tuple[Any, VideoWriter]:
    model = build(name, folder)
    if name.startswith("qwen"):
        model.lm_head.weight.data[VIDEO_TOKEN_ID] = 0.0  # transformers would take it for a placeholder
        model.save_pretrained(folder)
    settings = {"min_pixels": 64} | next((one for key, one in LIMITS.items() if name.startswith(key)), {})
    Path(folder, "video_preprocessor_config.json").write_text(json.dumps(settings | {"temporal_patch_size": 2}))
    return model, VideoWriter(folder, folder)


def workload(write: VideoWriter, seed: int = 0) -> list[VideoPrompt]:
    """Text, a video, one and an image in both orders, two videos, the same again, and an odd number of frames."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(30, 250) for _ in range(length)]

    image, short, odd = picture(0, 40, 30), Video(1, 4, 40, 30), Video(2, 5, 33, 61)
    return [
        write(*text(33)),
        write(*text(5), short, *text(7)),
        write(odd, *text(3)),
        write(*text(4), image, *text(2), short, *text(5)),
        write(*text(4), odd, *text(2), image, *text(2), short, *text(3)),
        write(*text(6), Video(3, 1, 50, 40), *text(2)),
    ]


def check(name: str, model: Any, prompts: list[VideoPrompt], results: list[Result], interval: float = 0.25) -> None:
    for prompt, result in zip(prompts, results):
        assert result.error is None and len(result.token_ids) == GREEDY.max_tokens, result.error
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        reference = VideoReference(name, model, prompt, interval if name == "qwen2_5_vl" else None)
        wrong, error = judge(reference, prompt.token_ids, result.token_ids, logprobs)
        assert (wrong, error < 1e-3) == (0, True), f"{len(prompt.videos)} videos: {wrong} wrong, error {error}"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_equal_transformers(name, tmp_path):
    """Also in chunks that cut frames, after preemption and with prefix hits."""
    model, write = built(name, tmp_path)
    prompts = workload(write)
    longest = max(len(prompt.token_ids) for prompt in prompts) + GREEDY.max_tokens
    check(name, model, prompts, run(tmp_path, prompts, max_model_len=str(max(longest, 400))))
    groups = plan_cache(cache_specs(read_model_spec(str(tmp_path)), 4)).groups
    num_blocks = most_blocks(groups, longest, 4, 26) + 1
    tight = {"num_gpu_blocks_override": num_blocks, "max_model_len": str(longest), "max_num_batched_tokens": 26}
    engine = InProcessEngine(str(tmp_path), **SMALL | tight | {"steps_in_flight": 2})
    first = generate(engine, prompts)
    again = generate(engine, prompts[::-1])[::-1]
    generate(engine, prompts[1:2])
    last = generate(engine, prompts[1:2])
    engine.close()
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert last[0].num_cached_tokens > 20
    for results in (first, again):
        check(name, model, prompts, results)
    check(name, model, prompts[1:2], last)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2_5_vl", {"tensor_parallel_size": 2}),
        ("qwen3_vl", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "steps_in_flight": 4}),
        ("internvl", {"pipeline_parallel_size": 2}),
    ],
    ids=["tp2", "tp2-pp2", "pp2"],
)
def test_several_ranks(name, settings, tmp_path):
    """The first stage encodes, in chunks that cut frames."""
    model, write = built(name, tmp_path)
    prompts = workload(write)
    several = {"num_threads": 1, "debug_check_ranks": True, "max_num_batched_tokens": 26} | settings
    engine = InProcessEngine(str(tmp_path), **SMALL | several)
    try:
        check(name, model, prompts, generate(engine, prompts))
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters(name, tmp_path):
    """Adapters of the language model change the answers to videos, and share no blocks with the model alone."""
    model, write = built(name, tmp_path)
    prompts = workload(write)[1:4]
    decoder = model.model.language_model
    targets = {
        key: one for key, one in decoder.named_modules() if key.split(".")[-1] in ("q_proj", "v_proj", "up_proj")
    }
    random_numbers, tensors, changes = torch.Generator().manual_seed(0), {}, {}
    for key, linear in targets.items():
        a = torch.randn(4, linear.in_features, generator=random_numbers) / linear.in_features**0.5
        b = torch.randn(linear.out_features, 4, generator=random_numbers) / 2
        whole = f"base_model.model.model.language_model.{key}"
        tensors |= {f"{whole}.lora_A.weight": a, f"{whole}.lora_B.weight": b}
        changes[key] = b @ a
    names = sorted({key.split(".")[-1] for key in targets})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": names}
    write_adapter(tmp_path / "adapter", settings, tensors)
    engine = InProcessEngine(str(tmp_path), **SMALL | {"enable_lora": True})
    alone = generate(engine, prompts)
    media, adapters = [one.media for one in prompts], [[use(tmp_path / "adapter")]] * len(prompts)
    adapted = engine.generate([one.token_ids for one in prompts], GREEDY, media=media, adapters=adapters)
    engine.close()
    check(name, model, prompts, alone)
    with torch.no_grad():
        for key, change in changes.items():
            targets[key].weight += change
    check(name, model, prompts, adapted)
    assert [one.token_ids for one in alone] != [one.token_ids for one in adapted]


def test_a_file(tmp_path):
    """The frames of a file are those that PyAV decodes, and the answer is transformers'."""
    av = pytest.importorskip("av")
    model, write = built("qwen3_vl", tmp_path)
    data = film(num_frames=9, size=(64, 48))
    with av.open(io.BytesIO(data)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    prompt = write(*range(40, 48), VideoFile(data), *range(50, 55))
    processor = write.video_processor
    clip = Clip(frames, 4.0)
    facts = replace(clip.facts, is_sampled=False)
    chosen = processor.indices(facts, {})
    expected = processor(facts, chosen, clip.frames(chosen), {})
    for part, other in zip(prompt.videos[0].parts, expected.parts, strict=True):
        difference = np.abs(part.features["pixel_values"] - other.features["pixel_values"])
        assert difference.max() < 3 / 127.5 and part.time == other.time  # conversions of colors round differently
    assert prompt.videos[0].text == expected.text
    check("qwen3_vl", model, [prompt], run(tmp_path, [prompt]))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_text_after_a_long_video(name, tmp_path):
    """It continues after the last frame's time, as in training; later versions of transformers let it begin earlier."""
    model, write = built(name, tmp_path)
    prompt = write(*range(40, 45), Video(5, 24, 24, 16, fps=1.0), *range(50, 60))
    (video,) = prompt.videos
    interval = model.config.vision_config.tokens_per_second * 2.0 if name == "qwen2_5_vl" else 1.0
    assert interval * (len(video.parts) - 1) > max(video.parts[0].grid)

    def positions(ids: list[int]) -> torch.Tensor:
        return published_positions(ids, [(len(video.parts), *video.parts[0].grid[1:])], interval)

    (result,) = run(tmp_path, [prompt])
    assert result.error is None, result.error
    reference = VideoReference(name, model, prompt, 2.0, positions)
    wrong, error = judge(
        reference, prompt.token_ids, result.token_ids, [entry.logprobs[0] for entry in result.logprobs]
    )
    assert wrong == 0 and error < 1e-3


def test_the_times_of_frames_are_part_of_their_identity(tmp_path):
    """The same frames at another rate have other positions, and share no blocks."""
    _, write = built("qwen2_5_vl", tmp_path)
    slow, fast = (write(*range(40, 48), Video(1, 8, 40, 30, fps=fps), 51) for fps in (0.5, 2.0))
    assert slow.token_ids == fast.token_ids
    assert [one.time for one in slow.media] != [one.time for one in fast.media]
