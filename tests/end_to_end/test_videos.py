"""Models that read videos through the engine: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.worker.messages import most_blocks
from quire.worker.models.registry import read_model_spec
from quire.worker.spec.cache import plan_cache
from quire.worker.spec.model import cache_specs
from tests.end_to_end.test_images import GREEDY, SMALL, generate, run
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.image_prompts import build, picture
from tests.helpers.models.judges import judge
from tests.helpers.models.qwen_gemma_models import VIDEO_TOKEN_ID
from tests.helpers.models.video_prompts import Video, VideoPrompt, VideoReference, VideoWriter, published_positions

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
