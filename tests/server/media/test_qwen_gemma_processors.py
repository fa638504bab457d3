"""Preprocessing of Qwen-VL and Gemma equals that of transformers' processors on Pillow."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.server.media.families.gemma import Gemma3Processor, Gemma4Processor
from quire.server.media.families.qwen_vl import MAX_RATIO, PaddleOCRVLProcessor, QwenVLProcessor, smart_size
from quire.server.media.registry import load_processor
from tests.server.media.test_llava_processors import IMAGES, expanded, noise, same_pixels, transformers_class

PATCH, SIDE = 7, 28
VISION = {"image_size": SIDE, "patch_size": PATCH, "pooling_kernel_size": 2}
SOME = settings(max_examples=40, deadline=None)


def pil_class(model: str, prefix: str):
    return transformers_class(model, "image_processing_pil", f"{prefix}ImageProcessorPil")


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), least=st.integers(1, 9000), more=st.integers(0, 40_000))
def test_qwen(images, least, more):
    assume(all(max(image.size) <= MAX_RATIO * min(image.size) for image in images))
    size = {"shortest_edge": least, "longest_edge": least + more}
    expected = pil_class("qwen2_vl", "Qwen2VL")(patch_size=PATCH, size=size)(images)
    processor = QwenVLProcessor({"vision_config": VISION}, {"patch_size": PATCH})
    own = SimpleNamespace(image_token=processor.image_token, image_processor=SimpleNamespace(merge_size=2))
    replaced = transformers_class("qwen2_vl", "processing", "Qwen2VLProcessor").replace_image_token
    grids = expected["image_grid_thw"]
    patches = np.split(expected["pixel_values"], np.cumsum(grids.prod(1))[:-1])
    for i, found in enumerate(processor(images, {"size": size})):
        frames = found.features["pixel_values"]
        assert frames.shape[2] == 1 and frames.flags.c_contiguous
        same_pixels(np.repeat(frames, 2, 2).reshape(len(frames), -1), patches[i])
        assert found.features["grid"].tolist() == grids[i].tolist()
        assert found.grid == (1, grids[i][1] // 2, grids[i][2] // 2)
        assert expanded(found, processor.image_token) == replaced(own, expected, i)


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), least=st.integers(1, 9000), more=st.integers(0, 40_000))
def test_paddleocr(images, least, more):
    assume(all(max(image.size) <= MAX_RATIO * min(image.size) for image in images))
    size = {"shortest_edge": least, "longest_edge": least + more}
    expected = pil_class("paddleocr_vl", "PaddleOCRVL")(patch_size=PATCH, size=size)(images)
    processor = PaddleOCRVLProcessor({"vision_config": VISION}, {"patch_size": PATCH})
    grids = expected["image_grid_thw"]
    patches = np.split(expected["pixel_values"], np.cumsum(grids.prod(1))[:-1])
    for i, found in enumerate(processor(images, {"size": size})):
        _, rows, columns = grids[i].tolist()
        by_token = np.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 2).reshape(-1)
        same_pixels(found.features["pixel_values"].reshape(patches[i].shape), patches[i][by_token])
        assert found.features["grid"].tolist() == grids[i].tolist()
        assert sum(found.counts) == processor.num_tokens([images[i].size], {"size": size})[0] == rows * columns // 4


@given(width=st.integers(1, 9000), height=st.integers(1, 9000), least=st.integers(1, 200_000))
def test_sizes_of_paddleocr(width, height, least):
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    theirs = transformers_class("paddleocr_vl", "image_processing_pil", "smart_resize")
    processor = PaddleOCRVLProcessor({"vision_config": VISION}, {})
    assert processor.size(height, width, 28, least, 2 * least) == theirs(height, width, 28, least, 2 * least)


@given(
    width=st.integers(1, 9000),
    height=st.integers(1, 9000),
    unit=st.sampled_from([28, 32]),
    least=st.integers(1, 200_000),
    more=st.integers(0, 20_000_000),
)
def test_sizes_of_qwen(width, height, unit, least, more):
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    theirs = transformers_class("qwen2_vl", "image_processing_pil", "smart_resize")
    assert smart_size(height, width, unit, least, least + more) == theirs(height, width, unit, least, least + more)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": 784, "max_pixels": 7840},  # Qwen2-VL's file
        {"size": {"shortest_edge": 784, "longest_edge": 7840}},  # Qwen3-VL's
        {"size": {"min_pixels": 784, "max_pixels": 7840}},
    ],
)
def test_limits_of_qwen(settings):
    processor = QwenVLProcessor({"vision_config": VISION}, settings | {"patch_size": PATCH})
    large, small = noise(300, 200), noise(9, 9)
    tokens = [sum(image.counts) for image in processor([large, small], {})]
    assert tokens == [35, 4]  # of 40 and 4
    assert sum(processor([large], {"max_pixels": 3920})[0].counts) <= 20
    assert sum(processor([small], {"min_pixels": 1568})[0].counts) >= 8


def test_low_detail():
    """As many pixels as OpenAI's low detail has, and Gemma 4's smallest budget; high is the model's own."""
    image = noise(1600, 1200)
    qwen, gemma = QwenVLProcessor({"vision_config": {}}, {}), Gemma4Processor({"vision_config": {}}, {})
    counts = [[sum(p([image], {"detail": d})[0].counts) for d in ("low", "high", "auto")] for p in (qwen, gemma)]
    assert counts[0][0] <= 512 * 512 / 28**2 < 1000 < counts[0][1] == counts[0][2]
    assert counts[1][0] <= 70 < 200 < counts[1][1] == counts[1][2] <= 280


@SOME
@given(image=IMAGES, scans=st.booleans(), least=st.integers(20, 100), most=st.integers(1, 4), ratio=st.floats(1, 2))
def test_gemma3(image, scans, least, most, ratio):
    names = "min_crop_size", "max_num_crops", "min_ratio_to_activate"
    options = dict(zip((f"pan_and_scan_{name}" for name in names), (least, most, ratio))) | {"do_pan_and_scan": scans}
    size = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    expected = pil_class("gemma3", "Gemma3")(**size)(image, **options)
    config = {"vision_config": VISION, "mm_tokens_per_image": 4}
    processor = Gemma3Processor(config, size | dict.fromkeys(options))  # null in the published files
    found = processor([image], options)[0]
    same_pixels(found.features["pixel_values"], np.stack(expected["pixel_values"]), 0.5)
    whole = "\n\n<start_of_image>" + processor.image_token * 4 + "<end_of_image>\n\n"
    replaced = transformers_class("gemma3", "processing", "Gemma3Processor").replace_image_token
    text = replaced(SimpleNamespace(full_image_sequence=whole), expected, 0)
    assert expanded(found, processor.image_token) == text
    assert len(processor([image], {})[0].features["pixel_values"]) == 1


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), budget=st.sampled_from(Gemma4Processor.budgets))
def test_gemma4(images, budget):
    settings = {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": budget}
    expected = pil_class("gemma4", "Gemma4")(**settings)(images)
    processor = Gemma4Processor({"vision_config": {}}, settings)
    own = SimpleNamespace(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
    replaced = transformers_class("gemma4", "processing", "Gemma4Processor").replace_image_token
    for i, found in enumerate(processor(images, {})):
        pixels, (rows, columns) = found.features["pixel_values"], found.features["grid"]
        same_pixels(pixels, expected["pixel_values"][i][: len(pixels)], 1)
        places = expected["image_position_ids"][i]
        assert (places[: len(pixels)].max(0) == [columns - 1, rows - 1]).all() and (places[len(pixels) :] == -1).all()
        assert expanded(found, "<|image|>") == replaced(own, expected, i)


@given(width=st.integers(1, 30_000), height=st.integers(1, 30_000), budget=st.sampled_from(Gemma4Processor.budgets))
def test_sizes_of_gemma4(width, height, budget):
    from quire.server.media.families.gemma import fitting_grid

    theirs = transformers_class("gemma4", "image_processing_pil", "get_aspect_ratio_preserving_size")
    rows, columns = fitting_grid(height, width, 48, budget)
    assert (rows * 48, columns * 48) == theirs(height, width, 16, budget * 9, 3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (QwenVLProcessor, {"min_pixels": 0}, "min_pixels must be an integer from 1 to 67108864"),
        (QwenVLProcessor, {"min_pixels": 900, "max_pixels": 800}, "min_pixels 900 is more than max_pixels 800"),
        (QwenVLProcessor, {"size": {"height": 3}}, "size must have shortest_edge and longest_edge"),
        (QwenVLProcessor, {"size": 3}, "size must have shortest_edge and longest_edge"),
        (QwenVLProcessor, {"detail": "medium"}, "detail must be low, high or auto"),
        (Gemma3Processor, {"do_pan_and_scan": 1}, "do_pan_and_scan must be true or false"),
        (
            Gemma3Processor,
            {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 99},
            "max_num_crops must be an integer from 1 to 16",
        ),
        (
            Gemma3Processor,
            {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": "1"},
            "min_ratio_to_activate must be a number above 0",
        ),
        (Gemma4Processor, {"max_soft_tokens": 100}, "max_soft_tokens must be one of 70, 140, 280, 560, 1120"),
    ],
)
def test_refused_options(kind, options, message):
    processor = kind({"vision_config": VISION}, {})
    assert set(options) <= processor.options
    with pytest.raises(ValueError, match=re.escape(message)):
        processor([noise(30, 20)], options)


def test_long_images():
    image = noise(30_000, 1)
    with pytest.raises(ValueError, match="one side is 30000 times as long as the other, and the limit is 200"):
        QwenVLProcessor({"vision_config": VISION}, {})([image], {})
    assert Gemma4Processor({"vision_config": {}}, {})([image], {})[0].counts == [280]
    crops = Gemma3Processor({"vision_config": VISION}, {})([image], {"do_pan_and_scan": True})[0]
    assert len(crops.counts) == 1  # crops of one row of pixels would be too small


def test_refused_settings():
    with pytest.raises(ValueError, match=r"size 20 is not vision_config\.image_size 28"):
        Gemma3Processor({"vision_config": VISION}, {"size": {"height": 20, "width": 20}})


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Gemma3ForConditionalGeneration", Gemma3Processor),
        ("Gemma4ForConditionalGeneration", Gemma4Processor),
        ("PaddleOCRVLForConditionalGeneration", PaddleOCRVLProcessor),
        ("Qwen2VLForConditionalGeneration", QwenVLProcessor),
        ("Qwen2_5_VLForConditionalGeneration", QwenVLProcessor),
        ("Qwen3VLForConditionalGeneration", QwenVLProcessor),
        ("Qwen3VLMoeForConditionalGeneration", QwenVLProcessor),
    ],
)
def test_architectures(architecture, kind, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"], "vision_config": {{}}}}')
    assert type(load_processor(tmp_path)) is kind
