"""Preprocessing of DeepSeek-OCR-2 equals that of transformers' processor on Pillow; that of DeepSeek-OCR and
Unlimited-OCR, which transformers has for torchvision only, a plain reading of the published code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from quire.server.media.families.deepseek_ocr import DeepseekOCR2Processor, DeepseekOCRProcessor, UnlimitedOCRProcessor
from quire.server.media.processor import ProcessedImage
from tests.server.media.test_llava_processors import noise, transformers_class

OCR, UNLIMITED, OCR2 = DeepseekOCRProcessor({}, {}), UnlimitedOCRProcessor({}, {}), DeepseekOCR2Processor({}, {})
SIDES = st.integers(1, 400)


def published_grid(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    ratios = {(i, j) for n in range(2, most + 1) for i in range(1, n + 1) for j in range(1, n + 1)}
    best, best_difference = (1, 1), math.inf
    for c, r in sorted((ratio for ratio in ratios if 2 <= ratio[0] * ratio[1] <= most), key=lambda x: x[0] * x[1]):
        difference = abs(width / height - c / r)
        larger = difference == best_difference and width * height > 0.5 * tile * tile * c * r
        if difference < best_difference or larger:
            best, best_difference = (c, r), difference
    return best


def published(image: Image.Image, base: int, tile: int, cuts: bool, most: int) -> tuple[Any, list[Any], int]:
    """The view, the tiles, and the number of tokens."""
    tiles, grid = [], (1, 1)
    if cuts and (image.width > tile or image.height > tile):
        grid = published_grid(*image.size, tile, most)
        large = image.resize((tile * grid[0], tile * grid[1]))
        for i in range(grid[0] * grid[1]):
            x, y = i % grid[0] * tile, i // grid[0] * tile
            tiles.append(np.asarray(large.crop((x, y, x + tile, y + tile))))
    if not cuts and tile <= 640:
        view = image.resize((base, base))
    else:
        view = ImageOps.pad(image, (base, base), color=(127, 127, 127))
    queries, queries_base = math.ceil(tile // 16 / 4), math.ceil(base // 16 / 4)
    tokens = (["<image>"] * queries_base + ["<image>"]) * queries_base + ["<image>"]
    if tiles:
        tokens += (["<image>"] * (queries * grid[0]) + ["<image>"]) * (queries * grid[1])
    return np.asarray(view), tiles, len(tokens)


def check(found: ProcessedImage, view: np.ndarray, tiles: list[np.ndarray], count: int) -> None:
    assert (found.text, found.counts) == ("<image>", [count])
    np.testing.assert_array_equal(found.features["pixel_values"], view[None])
    assert ("pixel_values_local" in found.features) == ("grid" in found.features) == bool(tiles)
    if tiles:
        np.testing.assert_array_equal(found.features["pixel_values_local"], np.stack(tiles))
        assert np.prod(found.features["grid"]) == len(tiles)


@settings(max_examples=60, deadline=None)
@given(
    width=SIDES,
    height=SIDES,
    base=st.integers(1, 10),
    tile=st.integers(1, 6),
    cuts=st.booleans(),
    most=st.sampled_from([2, 6, 32]),
)
def test_equals_the_published_code(width, height, base, tile, cuts, most):
    if min(width, height) * 16 * base < max(width, height):
        return  # a side of 0 pixels, on which the published code fails
    base, tile = 16 * base, 16 * (tile if cuts else base)
    image = noise(width, height)
    options = {"base_size": base, "image_size": tile, "crop_mode": cuts, "max_crops": most}
    check(OCR([image], options)[0], *published(image, base, tile, cuts, most))


@pytest.mark.slow
@pytest.mark.parametrize(
    "processor, options, expected",
    [
        (OCR, {}, (1024, 640, True, 6)),
        (OCR, {"mode": "gundam"}, (1024, 640, True, 6)),
        (OCR, {"mode": "tiny"}, (512, 512, False, 6)),
        (OCR, {"mode": "small"}, (640, 640, False, 6)),
        (OCR, {"mode": "base"}, (1024, 1024, False, 6)),
        (OCR, {"mode": "large"}, (1280, 1280, False, 6)),
        (OCR, {"crop_mode": False}, (1024, 1024, False, 6)),
        (OCR, {"crop_mode": False, "image_size": 512}, (512, 512, False, 6)),
        (OCR, {"mode": "base", "crop_mode": True, "image_size": 640}, (1024, 640, True, 6)),
        (UNLIMITED, {}, (1024, 640, True, 32)),
    ],
)
@pytest.mark.parametrize("size", [(1700, 900), (640, 641), (600, 640)])
def test_modes(processor, options, expected, size):
    image = noise(*size)
    check(processor([image], options)[0], *published(image, *expected))


def test_token_counts():
    """Those that the model card names: 64, 100, 256 and 400 embeddings, plus ends of rows and a separator."""
    image = noise(700, 1000)
    sides = {"tiny": 8, "small": 10, "base": 16, "large": 20}
    for mode, side in sides.items():
        assert OCR([image], {"mode": mode})[0].counts == [side * (side + 1) + 1]
    assert OCR([image], {})[0].counts == [16 * 17 + 1 + 30 * 21]  # 2 x 3 tiles


def test_unlimited_cuts_single_images_only():
    image = noise(700, 1000)
    one, two = UNLIMITED([image], {}), UNLIMITED([image, image], {})
    assert "grid" in one[0].features and not any("grid" in page.features for page in two)
    assert all("grid" in page.features for page in UNLIMITED([image, image], {"crop_mode": True}))
    assert all("grid" in page.features for page in OCR([image, image], {}))


class SmallSquares(DeepseekOCR2Processor):
    check_side = DeepseekOCRProcessor.check_side  # no encoder has queries for them, but transformers prepares them


def check_second_version(image: Image.Image, base: int, tile: int, cuts: bool) -> ProcessedImage:
    cls = transformers_class("deepseek_ocr2", "image_processing_pil", "DeepseekOcr2ImageProcessorPil")
    processor = cls(size={"height": base, "width": base}, tile_size=tile)
    expected = processor([image], crop_to_patches=cuts, return_tensors="np")
    options = {"base_size": base if cuts else tile, "image_size": tile, "crop_mode": cuts}
    found = (SmallSquares if base < 768 else DeepseekOCR2Processor)({}, {})([image], options)[0]
    for name in ("pixel_values", "pixel_values_local"):
        assert (name in found.features) == (name in expected)
        if name in expected:
            ours = found.features[name].transpose(0, 3, 1, 2) / 127.5 - 1
            np.testing.assert_allclose(ours, expected[name], atol=1 / 255)
    assert len(found.features.get("pixel_values_local", ())) == expected["num_local_patches"][0]
    return found


@settings(max_examples=40, deadline=None)
@given(width=SIDES, height=SIDES, base=st.integers(4, 10), tile=st.integers(1, 6), cuts=st.booleans())
def test_second_version_equals_transformers(width, height, base, tile, cuts):
    if 16 * min(base, tile) * min(width, height) < max(width, height):
        return  # a side of 0 pixels, on which transformers fails
    check_second_version(noise(width, height), 16 * base, 16 * tile, cuts)


@pytest.mark.slow
def test_tokens_of_the_second_version():
    image = noise(800, 1000)
    assert check_second_version(image, 1024, 768, True).counts == [256 + 144 * 6 + 1]
    assert check_second_version(image, 1024, 768, False).counts == OCR2([image], {"mode": "small"})[0].counts == [145]
    assert OCR2([image], {"mode": "base"})[0].counts == [257]


def test_settings_of_the_model():
    image = noise(300, 200)
    own = DeepseekOCRProcessor({}, {"base_size": 256, "image_size": 64, "crop_mode": True, "image_mean": [0.5] * 3})
    check(own([image], {})[0], *published(image, 256, 64, True, 6))
    theirs = DeepseekOCR2Processor({}, {"size": {"height": 1024, "width": 1024}, "tile_size": 1024, "max_patches": 2})
    assert theirs([noise(1100, 500)], {})[0].counts == [256 * 3 + 1]
    with pytest.raises(ValueError, match="image_mean"):
        DeepseekOCRProcessor({}, {"image_mean": [0.4, 0.5, 0.5]})
    with pytest.raises(ValueError, match="preprocessor: image_size must be a multiple of 16 up to 1280, not 100"):
        DeepseekOCRProcessor({}, {"image_size": 100})


@pytest.mark.parametrize(
    "processor, options, message",
    [
        (OCR, {"mode": "huge"}, "mode must be one of tiny, small, base, large, gundam, not 'huge'"),
        (OCR, {"mode": ["tiny"]}, "mode must be one of"),
        (OCR, {"base_size": 1000}, "base_size must be a multiple of 16 up to 1280, not 1000"),
        (OCR, {"base_size": 2048}, "base_size must be an integer from 1 to 1280"),
        (OCR, {"image_size": "640"}, "image_size must be an integer"),
        (OCR, {"crop_mode": 1}, "crop_mode must be true or false"),
        (OCR, {"crop_mode": False, "image_size": 640, "base_size": 1024}, "image_size 640 must be base_size, 1024"),
        (OCR, {"max_crops": 33}, "max_crops must be an integer from 1 to 32"),
        (OCR2, {"image_size": 640}, "image_size must be 768 or 1024, not 640"),
        (OCR2, {"mode": "tiny"}, "mode must be one of small, base, gundam"),
    ],
)
def test_options_out_of_range(processor, options, message):
    with pytest.raises(ValueError, match=message):
        processor([noise(8, 8)], options)


def test_an_image_of_one_row():
    counts = OCR([noise(3000, 1)], {})[0].counts
    assert counts == [16 * 17 + 1 + 10 * 61]  # 6 x 1 tiles
