"""Preprocessing of the newest models of images and documents equals that of transformers' processors on Pillow."""

from __future__ import annotations

import json
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

from quire.server.media.families.aya_vision import AyaVisionProcessor, Cohere2VisionProcessor
from quire.server.media.families.granite_docling import GraniteDoclingProcessor
from quire.server.media.families.inkling import Inkling2Processor, InklingProcessor
from quire.server.media.families.kimi_k25 import KimiK25Processor
from quire.server.media.families.llava_next import Granite4VisionProcessor, LlavaNextProcessor
from quire.server.media.families.minicpmv import MiniCPMVProcessor
from quire.server.media.families.pixtral import LightOnOCRProcessor, PixtralProcessor
from quire.server.media.families.qwen_vl import MAX_RATIO, GlmVProcessor
from quire.server.media.inputs import ORDINAL, PreparedMedium, PreparedPart
from quire.server.media.pixels import CLIP_MEAN, CLIP_STD
from quire.server.media.registry import load_processor
from quire.server.prompt.images import Illustrated
from tests.server.media.test_llava_processors import GRIDS, IMAGES, expanded, noise, same_pixels, transformers_class

PATCH, SIDE = 7, 28
VISION = {"image_size": SIDE, "patch_size": PATCH}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
COHERE = {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"}
SOME = settings(max_examples=40, deadline=None)


@cache
def without_torchvision(model: str, kind: str, name: str) -> Any:
    """A function of a module that imports torchvision for others."""
    names = "torchvision", "torchvision.transforms", "torchvision.transforms.v2"
    with patch.dict(sys.modules, dict.fromkeys(names, SimpleNamespace(functional=None))):
        return transformers_class(model, kind, name)


def pil(model: str, prefix: str, **options: Any) -> Any:
    return transformers_class(model, "image_processing_pil", f"{prefix}ImageProcessorPil")(**options)


@pytest.mark.parametrize(
    ("make", "beyond", "mean", "std"),
    [(InklingProcessor, 1, CLIP_MEAN, CLIP_STD), (Inkling2Processor, 0, (0.5,) * 3, (0.5,) * 3)],
)
@SOME
@given(image=IMAGES)
def test_inkling(make, beyond, mean, std, image):
    """Against a loop over the squares, as transformers' processor (which needs torchvision) makes them."""
    pixels, expected = np.asarray(image, np.float32), []
    for top in range(0, image.height, SIDE):
        for left in range(0, image.width + beyond, SIDE):
            square = np.full((SIDE, SIDE, 3), -1.0)
            found = pixels[top : top + SIDE, left : left + SIDE]
            square[: found.shape[0], : found.shape[1]] = found
            expected.append((square / 255 - mean) / std)
    (found,) = make({"vision_config": VISION}, SQUARE)([image], {})
    assert found.counts == [len(expected)]
    np.testing.assert_allclose(found.features["pixel_values"], expected, atol=1e-5)


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), least=st.integers(1, 9000), more=st.integers(0, 40_000))
def test_glm(images, least, more):
    assume(all(max(image.size) <= MAX_RATIO * min(image.size) for image in images))
    size = {"shortest_edge": least, "longest_edge": least + more}
    expected = pil("glm4v", "Glm4v", patch_size=PATCH, size=size)(images)
    grids = expected["image_grid_thw"]
    patches = np.split(expected["pixel_values"], np.cumsum(grids.prod(1))[:-1])
    processor = GlmVProcessor({"vision_config": VISION}, {"patch_size": PATCH})
    for i, found in enumerate(processor(images, {"size": size})):
        frames = found.features["pixel_values"]
        assert found.features["grid"].tolist() == grids[i].tolist()
        same_pixels(np.repeat(frames, 2, 2).reshape(len(frames), -1), patches[i])


@SOME
@given(
    image=IMAGES,
    most=st.integers(1, 40),
    fine=st.booleans(),
    dense=st.sampled_from([{}, {"dense_max_patches": 9, "dense_max_scale": 0.5, "dense_min_aspect": 1.1}]),
    largest=st.sampled_from([0, 2.5]),
)
def test_granite_docling(image, most, fine, dense, largest):
    dense = dense and dense | {"dense_max_aspect": largest}
    expected = pil("granite_docling", "GraniteDocling", **SQUARE, **dense)([image], max_patches=most, fine_route=fine)
    processor = GraniteDoclingProcessor({"vision_config": VISION | {"scale_factor": 2}}, SQUARE | dense)
    found = processor([image], {"max_patches": most, "fine_route": fine})[0]
    same_pixels(found.features["pixel_values"], expected["pixel_values"][0])
    own = SimpleNamespace(
        image_token="<image>",
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
    )
    replaced = transformers_class("granite_docling", "processing", "GraniteDoclingProcessor").replace_image_token
    assert expanded(found, "<image>") == replaced(own, expected, 0)
    assert ("fine" in found.features) == fine


@SOME
@given(image=IMAGES, most=st.integers(1, 12))
def test_aya_vision(image, most):
    options = {"max_patches": most, "crop_to_patches": True}
    expected = pil("got_ocr2", "GotOcr2", **SQUARE)(image, **options)
    found = AyaVisionProcessor({"vision_config": VISION}, SQUARE)([image], options)[0]
    same_pixels(found.features["pixel_values"], np.stack(expected["pixel_values"]))
    named = transformers_class("aya_vision", "processing", "AyaVisionProcessor")
    own = object.__new__(named)
    own.__dict__ |= {
        "img_size": SIDE,
        "patch_size": 2 * PATCH,
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
    }
    own.__dict__ |= COHERE | {"img_patch_token": "<|IMG_PATCH|>"}
    assert expanded(found, "<|IMG_PATCH|>") == own.replace_image_token(expected, 0)


@SOME
@given(image=IMAGES, most=st.integers(1, 900), side=st.integers(2, 40), own=st.booleans())
def test_kimi_k25(image, most, side, own):
    fitted = without_torchvision("kimi_k25", "image_processing", "navit_resize")
    (height, width), canvas = fitted(image.height, image.width, PATCH, 2, most, side)
    settings = {"max_patches": most, "size": {"max_height": side, "max_width": side}, "patch_size": PATCH}
    if own:  # the names of Kimi's files
        settings = {
            "in_patch_limit": most,
            "patch_limit_on_one_side": side,
            "patch_size": PATCH,
            "merge_kernel_size": 2,
        }
        settings = {"media_proc_cfg": settings | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}
    found = KimiK25Processor({"vision_config": {}}, settings)([image], {})[0]
    grid = found.features["grid"].tolist()
    assert grid == [1, canvas[0] // PATCH, canvas[1] // PATCH] and found.counts == [grid[1] * grid[2] // 4]
    groups = found.features["pixel_values"].reshape(grid[1] // 2, grid[2] // 2, 2, 2, 3, PATCH, PATCH)
    pixels = groups.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *canvas)
    resized = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs((pixels[:, :height, :width] + 1) * 127.5 - resized).max() < 1e-3
    assert (pixels[:, height:] == -1).all() and (pixels[:, :, width:] == -1).all()


@SOME
@given(
    images=st.lists(IMAGES, min_size=1, max_size=2),
    most=st.integers(1, 12),
    mode=st.sampled_from(["4x", "16x"]),
    slices=st.booleans(),
)
def test_minicpmv(images, most, mode, slices):
    settings = {"scale_resolution": 56, "patch_size": PATCH, "downsample_mode": mode, "slice_mode": slices}
    reference = pil("minicpmv4_6", "MiniCPMV4_6", **settings)
    expected = reference(images, max_slice_nums=most)
    processor = MiniCPMVProcessor({"vision_config": {}, "downsample_mode": mode}, settings)
    found = processor(images, {"max_slice_nums": most} if slices else {})
    flat = np.concatenate([one.features["pixel_values"] for one in found])
    same_pixels(
        np.ascontiguousarray(flat.transpose(1, 2, 0, 3)).reshape(3, PATCH, -1), expected["pixel_values"][0], 0.5
    )
    assert np.concatenate([one.features["grids"] for one in found]).tolist() == expected["target_sizes"].tolist()
    named = transformers_class("minicpmv4_6", "processing", "MiniCPMV4_6Processor")
    own = object.__new__(named)
    own.__dict__ |= {"image_token": "<|image_pad|>", "slice_mode": slices}
    own.__dict__ |= {f"{a}_{b}_token": t for a, b, t in MARKS}
    texts = [
        own.replace_image_token(expected, i, image_token_divisor=4 if mode == "4x" else 16) for i in range(len(found))
    ]
    texts = own._prepend_local_ids(["<|image_pad|>" * len(found)], texts, "<|image_pad|>")
    assert [expanded(one, "<|image_pad|>").replace(ORDINAL, str(i)) for i, one in enumerate(found)] == texts


MARKS = [
    (name, side, f"<{'/' * (side == 'end')}{name}>")
    for name in ("image", "slice", "image_id")
    for side in ("start", "end")
]


def test_images_of_a_prompt_are_numbered():
    prepared = [PreparedMedium(str(i), 0, f"<id>{ORDINAL}<i>", [PreparedPart(str(i), "", [1])]) for i in range(2)]
    inputs = [SimpleNamespace(kind="image", lease=SimpleNamespace(medium=one)) for one in prepared]
    state = SimpleNamespace(images=SimpleNamespace(kinds={"image": SimpleNamespace(token="<i>", token_id=1)}))
    joined = Illustrated.join(["a", "b", "c"], ["image"] * 2, inputs, state, "messages")
    assert joined.text == "a<id>0<i>b<id>1<i>c"


def test_low_detail_of_kimi_k25():
    processor = KimiK25Processor({"vision_config": {}}, {})
    assert processor.num_tokens([(2800, 2800)], {}) == [64 * 64]
    assert processor.num_tokens([(2800, 2800)], {"detail": "low"}) == [18 * 18]


@SOME
@given(image=IMAGES, most=st.integers(1, 12), crops=st.booleans())
def test_cohere2_vision(image, most, crops):
    grid = without_torchvision("cohere2_vision", "image_processing", "get_optimal_tiled_canvas")
    columns, rows = grid((image.height, image.width), (SIDE, SIDE), 1, most) if crops else (1, 1)
    processor = Cohere2VisionProcessor({"vision_config": VISION}, SQUARE | {"crop_to_patches": crops})
    found = processor([image], {"max_patches": most})[0]
    whole = processor.reader.resize(image, rows * SIDE, columns * SIDE)
    parts = [
        np.asarray(whole)[r * SIDE : (r + 1) * SIDE, c * SIDE : (c + 1) * SIDE]
        for r in range(rows)
        for c in range(columns)
    ]
    parts += [np.asarray(processor.reader.resize(image, SIDE, SIDE))] * (len(parts) > 1)
    mean, std = np.array(CLIP_MEAN), np.array(CLIP_STD)
    expected = np.stack([(part / 255 - mean) / std for part in parts]).transpose(0, 3, 1, 2)
    same_pixels(found.features["pixel_values"], expected)
    named = transformers_class("cohere2_vision", "processing", "Cohere2VisionProcessor")
    own = object.__new__(named)
    own.__dict__ |= {"patch_size": 2, "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
    own.__dict__ |= {"image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
    assert expanded(found, "<|IMG_PATCH|>") == own.replace_image_token({"num_patches": [len(parts)]}, 0)


def test_a_page_of_docling_in_one_tile():
    processor = GraniteDoclingProcessor({"vision_config": VISION | {"scale_factor": 2}}, SQUARE)
    page = noise(90, 60)
    assert processor.num_tokens([page.size], {"detail": "low"}) == [4]
    assert processor([page], {"crop_to_patches": False})[0].counts == [4]
    coarse = GraniteDoclingProcessor({"vision_config": VISION | {"scale_factor": 2, "use_fine_route": False}}, SQUARE)
    with pytest.raises(ValueError, match="fine_route"):
        coarse.num_tokens([page.size], {"fine_route": True})


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=2))
def test_llava_next(images):
    edges = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    reference = pil("llava_next", "LlavaNext", **edges, image_grid_pinpoints=GRIDS)
    expected = reference(images, do_pad=False)
    named = transformers_class("llava_next", "processing", "LlavaNextProcessor")
    own = object.__new__(named)
    own.__dict__ |= {"image_token": "<image>", "patch_size": PATCH, "num_additional_image_tokens": 1}
    own.__dict__ |= {"vision_feature_select_strategy": "default", "image_processor": reference}
    config = {"vision_config": VISION, "image_grid_pinpoints": GRIDS}
    for i, found in enumerate(LlavaNextProcessor(config, edges)(images, {})):
        same_pixels(found.features["pixel_values"], expected["pixel_values"][i])
        assert expanded(found, "<image>") == own.replace_image_token(expected, i)


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=2))
def test_granite4_vision(images):
    reference = pil("llava_next", "LlavaNext", **SQUARE, crop_size=SQUARE["size"], image_grid_pinpoints=GRIDS)
    expected = reference(images, do_pad=False)
    config = {"vision_config": VISION, "image_grid_pinpoints": GRIDS, "downsample_rate": "1/2"}
    named = transformers_class("granite4_vision", "processing", "Granite4VisionProcessor")
    own = object.__new__(named)
    own.__dict__ |= {"image_token": "<image>", "patch_size": PATCH, "num_additional_image_tokens": 0}
    own.__dict__ |= {"vision_feature_select_strategy": "full", "downsample_rate": "1/2", "image_processor": reference}
    for i, found in enumerate(Granite4VisionProcessor(config, SQUARE)(images, {})):
        same_pixels(found.features["pixel_values"], expected["pixel_values"][i])
        assert expanded(found, "<image>") == own.replace_image_token(expected, i)


@SOME
@given(
    images=st.lists(IMAGES, min_size=1, max_size=3), longest=st.integers(14, 120), patch=st.sampled_from([PATCH, 14])
)
def test_lighton_ocr(images, longest, patch):
    assume(all(min(image.size) * longest >= max(image.size) for image in images))
    expected = pil("pixtral", "Pixtral", size={"longest_edge": longest})(images, patch_size=patch, do_pad=False)
    config = {"vision_config": {"image_size": 56, "patch_size": PATCH}, "spatial_merge_size": 2}
    processor = LightOnOCRProcessor(config, {"size": {"longest_edge": longest}, "patch_size": patch})
    for i, found in enumerate(processor(images, {})):
        height, width = found.features["pixel_values"].shape[1:]
        if (height, width) == expected["image_sizes"][i]:
            same_pixels(found.features["pixel_values"], expected["pixel_values"][i])
        else:  # theirs would have no token
            assert min(expected["image_sizes"][i]) < 14 <= min(height, width)
        assert found.counts == [(height // 14) * (width // 14)]


def test_mistral_large_4_joins_patches():
    processor = PixtralProcessor({"vision_config": VISION, "model_type": "mistral_large4"}, {})
    assert processor.num_tokens([(28, 14)], {}) == [2]


def test_the_image_token_of_the_tokenizer(tmp_path):
    config = {"architectures": ["Lfm3VlForConditionalGeneration"], "vision_config": {"patch_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_processor(tmp_path).placeholder == "<|image_pad|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"image_token": {"content": "<image>"}}))
    assert load_processor(tmp_path).placeholder == load_processor(tmp_path).image_token == "<image>"
