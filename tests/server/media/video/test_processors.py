"""Frames, sizes and texts of videos equal those of transformers' processors. These need torchvision for pixels: their
pure parts are called here, and the whole where it is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from quire.server.media.families.qwen_vl import MAX_RATIO
from quire.server.media.video.internvl import InternVLVideoProcessor
from quire.server.media.video.processor import VideoFacts
from quire.server.media.video.qwen_vl import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, size_of_frames
from tests.helpers.models.image_prompts import picture
from tests.server.media.test_llava_processors import noise, transformers_class

VISION = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2}
CONFIG = {"vision_config": VISION}
TILES = {"vision_config": {"image_size": 28, "patch_size": 7}}
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
COUNTS = st.integers(1, 3000)
RATES = st.sampled_from([1.0, 8.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0])


_TORCHVISION = list(itertools.accumulate(["torchvision", "transforms", "v2", "functional"], "{}.{}".format))


@cache
def video_class(model: str, prefix: str) -> Any:
    """The class, without torchvision for functions that are not called here."""
    importlib.import_module("transformers.video_processing_utils")  # not with the stubs
    stubs, module = {}, SimpleNamespace()
    for parent, _, name in (one.rpartition(".") for one in reversed(_TORCHVISION)):
        stubs[f"{parent}.{name}".strip(".")] = module
        module = SimpleNamespace(**{name: module})
    with patch.dict(sys.modules, {} if HAS_TORCHVISION else stubs):
        return transformers_class(model, "video_processing", f"{prefix}VideoProcessor")


def theirs(model: str, prefix: str, facts: VideoFacts, **options) -> list[int]:
    """The indices that transformers' processor chooses."""
    cls = video_class(model, prefix)
    names = ("fps", "num_frames", "min_frames", "max_frames", "temporal_patch_size", "initial_shift")
    own = SimpleNamespace(**{name: getattr(cls, name, None) for name in names})
    metadata = SimpleNamespace(total_num_frames=facts.num_frames, fps=facts.fps)
    return [int(index) for index in cls.sample_frames(own, metadata, **options)]


@given(count=COUNTS, rate=RATES, fps=st.sampled_from([0.5, 1, 2, 3.3, 4]))
def test_frames_by_rate(count, rate, fps):
    facts = VideoFacts(64, 48, count, rate)
    qwen3 = Qwen3VLVideoProcessor(CONFIG, {}).indices(facts, {"fps": fps})
    assert qwen3 == theirs("qwen3_vl", "Qwen3VL", facts, fps=fps)
    assert all(a <= b for a, b in itertools.pairwise(qwen3)) and qwen3[-1] < count
    qwen2 = Qwen2VLVideoProcessor(CONFIG, {}).indices(facts, {"fps": fps})
    if count > 1:  # transformers divides by 0
        expected = theirs("qwen2_vl", "Qwen2VL", facts, fps=fps)
        assert qwen2 == expected[: len(qwen2)] and len(expected) - len(qwen2) in (0, 1)
        assert all(index >= count for index in expected[len(qwen2) :])  # of rounding: beyond the video
    internvl = InternVLVideoProcessor(TILES, {"max_frames": 3000}).indices(facts, {"fps": fps})
    if int(count / rate * fps) and fps <= rate:
        assert internvl == theirs("internvl", "InternVL", facts, fps=fps)[: len(internvl)]


@given(count=COUNTS, rate=RATES, wanted=st.integers(1, 200))
def test_frames_by_number(count, rate, wanted):
    facts = VideoFacts(64, 48, count, rate)
    assume(wanted <= count)
    options = {"num_frames": wanted}
    found = Qwen3VLVideoProcessor(CONFIG, {}).indices(facts, options)
    assert found == theirs("qwen3_vl", "Qwen3VL", facts, **options)
    internvl = InternVLVideoProcessor(TILES, {}).indices(facts, options)
    assert internvl == theirs("internvl", "InternVL", facts, **options)[:wanted]
    if 0 < round(wanted / 2) * 2 <= count:
        qwen2 = Qwen2VLVideoProcessor(CONFIG, {}).indices(facts, options)
        assert qwen2 == theirs("qwen2_vl", "Qwen2VL", facts, **options)[: len(qwen2)]


@pytest.mark.parametrize("kind", [Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, InternVLVideoProcessor])
@given(count=st.integers(1, 40), wanted=st.integers(1, 60), fps=st.floats(0.1, 60), rate=RATES | st.none())
def test_there_is_always_a_frame(kind, count, wanted, fps, rate):
    """Videos shorter than the frames asked for, of one frame, and without a rate."""
    processor, facts = kind(TILES if kind is InternVLVideoProcessor else CONFIG, {}), VideoFacts(64, 48, count, rate)
    for options in ({}, {"num_frames": wanted}, {"fps": fps}, {"num_frames": wanted, "fps": fps}):
        found = processor.indices(facts, options)
        assert 1 <= len(found) <= count and found[0] >= 0 and found[-1] < count and found == sorted(found)
        assert processor.num_tokens(facts, options) > 0
    both = len(processor.indices(facts, {"num_frames": wanted, "fps": fps}))
    assert both <= min(len(processor.indices(facts, {"fps": fps})), max(2, wanted + 1))


@given(
    frames=st.integers(2, 800),
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
    unit=st.sampled_from([28, 32]),
    least=st.integers(1, 200_000),
    more=st.integers(0, 20_000_000),
)
def test_sizes_of_frames(frames, height, width, unit, least, more):
    smart = transformers_class("qwen3_vl", "video_processing", "smart_resize")
    try:
        expected = smart(frames, height, width, 2, unit, least, least + more)
    except ValueError:
        with pytest.raises(ValueError, match=f"limit is {MAX_RATIO}"):
            size_of_frames(frames, height, width, 2, unit, least, least + more)
        return
    assert size_of_frames(frames, height, width, 2, unit, least, least + more) == expected


def frames_of(count: int, width: int = 90, height: int = 50) -> list[Image.Image]:
    return [noise(width, height, i) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_text_of_qwen3(count):
    """The time between the frames of a pair; the last frame of an odd number stands for the missing one."""
    processor = Qwen3VLVideoProcessor(CONFIG, {"size": {"shortest_edge": 784, "longest_edge": 784 * 40}})
    facts = VideoFacts(90, 50, 100, 25.0)
    indices = [0, 24, 50, 75, 99][:count]
    video = processor(facts, indices, frames_of(count), {})
    replace = transformers_class("qwen3_vl", "processing", "Qwen3VLProcessor")
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    own._calculate_timestamps = lambda *arguments: replace._calculate_timestamps(own, *arguments)
    grid = np.array([len(video.parts), *video.parts[0].features["grid"][1:]])
    metadata = SimpleNamespace(fps=25.0, frames_indices=list(indices))
    text = replace.replace_video_token(own, {"video_grid_thw": grid[None], "video_metadata": [metadata]}, 0)
    pieces = video.text.split("<|video_pad|>")
    assert len(pieces) == len(video.parts) + 1
    counts = [sum(part.counts) for part in video.parts]
    assert "".join(piece + "<|video_pad|>" * n for piece, n in zip(pieces, [*counts, 0])) == text
    assert sum(counts) == processor.num_tokens(VideoFacts(90, 50, count, 25.0, is_sampled=True), {})


def test_text_and_tiles_of_internvl():
    processor = InternVLVideoProcessor(TILES, {})
    video = processor(VideoFacts(90, 50, 9, 3.0), [1, 4, 7], frames_of(3), {})
    token = processor.token
    replace = transformers_class("internvl", "processing", "InternVLProcessor").replace_video_token
    own = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token=token, image_seq_length=1)
    pixels = np.stack([part.features["pixel_values"][0] for part in video.parts])
    assert replace(own, {"pixel_values_videos": [pixels]}, 0) == video.text
    assert pixels.shape == (3, 3, 28, 28) and [part.counts for part in video.parts] == [[4]] * 3


def test_times_of_qwen2_5():
    """Two positions a second between pairs of frames of the sampled rate; those of Qwen2-VL are numbered."""
    facts = VideoFacts(90, 50, 100, 25.0)
    indices = list(range(0, 100, 20))
    plain = {name: value for name, value in VISION.items() if name != "tokens_per_second"}
    timed, numbered = (Qwen2VLVideoProcessor({"vision_config": one}, {}) for one in (VISION, plain))
    assert [part.time for part in timed(facts, indices, frames_of(5), {}).parts] == [None, 3, 6]  # 2 x 1.6 s
    assert [part.time for part in numbered(facts, indices, frames_of(5), {}).parts] == [None, 1, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fps": 0.0}, "fps must be a number above 0"),
        ({"fps": True}, "fps must be"),
        ({"fps": 1000}, "at most 240"),
        ({"num_frames": 1 << 20}, "num_frames must be an integer from 1 to 4096"),
        ({"num_frames": 2.5}, "num_frames must be"),
        ({"max_frames": -1}, "max_frames must be"),
        ({"size": {"height": 3}}, "shortest_edge and longest_edge"),
        ({"min_pixels": 9000, "max_pixels": 100}, "is more than max_pixels"),
    ],
)
def test_refused_options(options, says):
    with pytest.raises(ValueError, match=says):
        Qwen3VLVideoProcessor(CONFIG, {}).num_tokens(VideoFacts(90, 50, 100, 25.0), options)


def test_settings_that_the_encoder_cannot_take():
    with pytest.raises(ValueError, match="temporal_patch_size 4"):
        Qwen2VLVideoProcessor(CONFIG, {"temporal_patch_size": 4})
    with pytest.raises(ValueError, match="384 must be the encoder's"):
        InternVLVideoProcessor(TILES, {"size": {"height": 384, "width": 384}})


@pytest.mark.skipif(not HAS_TORCHVISION, reason="needs torchvision")
@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 6), height=st.integers(20, 90), width=st.integers(20, 90), capped=st.booleans())
def test_pixels(count, height, width, capped):
    frames = [picture(i, width, height).point(lambda value: 64 + value // 2) for i in range(count)]
    array = np.stack([np.asarray(frame) for frame in frames])
    facts = VideoFacts(width, height, count, 2.0, is_sampled=True)
    limits = {"size": {"shortest_edge": 784, "longest_edge": 784 * 12}, "cap_pixels_per_frame": capped}
    for model, prefix, kind in (
        ("qwen2_vl", "Qwen2VL", Qwen2VLVideoProcessor),
        ("qwen3_vl", "Qwen3VL", Qwen3VLVideoProcessor),
    ):
        cls = video_class(model, prefix)
        expected = cls(patch_size=7, **limits)([array], do_sample_frames=False, return_tensors="np")
        video = kind(CONFIG, limits | {"image_mean": cls.image_mean, "image_std": cls.image_std})(
            facts, list(range(count)), frames, {}
        )
        pixels = np.concatenate([part.features["pixel_values"] for part in video.parts])
        assert expected["video_grid_thw"][0].tolist() == [len(video.parts), *video.parts[0].features["grid"][1:]]
        # torchvision rounds and clips a resized byte once, Pillow after each direction
        errors = np.abs(pixels.reshape(len(pixels), -1) - expected["pixel_values_videos"])
        assert errors.max() < 2.01 / 255 / 0.26 and errors.mean() < 1e-3
