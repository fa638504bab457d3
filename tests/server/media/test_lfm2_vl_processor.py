"""Sizes, tiles and text of LFM2-VL's images equal those of transformers' processor, which needs torchvision: its pure
functions are called without.
"""

from __future__ import annotations

import ast
import math
import re
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from quire.server.media.families.lfm2_vl import Lfm2VLProcessor

CONFIG = {"vision_config": {"patch_size": 16}}
DEFAULTS = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}


SOURCE = Path(transformers.__file__).parent / "models" / "lfm2_vl" / "image_processing_lfm2_vl.py"


@cache
def theirs() -> SimpleNamespace:
    """The functions of the image processor's module that only compute sizes."""
    names = "round_by_factor find_closest_aspect_ratio smart_resize _is_image_too_large _get_grid_layout _target_ratios"
    functions = [
        node
        for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in names.split()
    ]
    found: dict[str, Any] = {"math": math, "lru_cache": lru_cache}
    exec(compile(ast.Module(functions, []), str(SOURCE), "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names.split()})


def expected(width: int, height: int) -> str:
    """The text of an image, its image tokens written out."""
    images, processor = theirs(), Lfm2VlProcessor
    own = SimpleNamespace(_target_ratios=lambda *sizes: images._target_ratios(None, *sizes))
    wide, high = images.smart_resize(None, height, width, min_image_tokens=64, **DEFAULTS)
    columns = rows = 1
    if images._is_image_too_large(None, height, width, max_pixels_tolerance=2.0, **DEFAULTS):
        columns, rows, *_ = images._get_grid_layout(own, height, width, 2, 10, 512)
    names = SimpleNamespace(
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        image_token="<image>",
    )
    whole = processor._compute_tokens_for_image(None, [high, wide], 16, 2)
    return processor._build_image_tokens(names, rows, columns, 256, whole, True, True)


@given(width=st.integers(20, 2200), height=st.integers(20, 2200))
@example(1024, 1024)
@example(512, 512)
@example(1500, 700)
@settings(max_examples=25, deadline=None)
def test_tokens_and_text(width, height):
    if max(width, height) / min(width, height) > 100:
        return
    processor = Lfm2VLProcessor(CONFIG, {})
    sizes, columns, rows = processor._parts(width, height, {})
    counts = iter(map(processor._tokens, sizes))
    text = re.sub("<image>", lambda _: "<image>" * next(counts), processor._text(len(sizes), columns, rows))
    assert text == expected(width, height)


def test_patches_have_their_pixels_row_by_row_and_colors_last():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))
    (found,) = Lfm2VLProcessor(CONFIG, {})([image], {})
    patches = found.features["pixel_values"]
    assert patches.shape == (32 * 32, 16 * 16 * 3) and found.features["grids"].tolist() == [[32, 32]]
    pixels = np.asarray(image).astype(np.float32) / 127.5 - 1.0
    np.testing.assert_allclose(patches[33].reshape(16, 16, 3), pixels[16:32, 16:32], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_image_tokens": 300}, "min_image_tokens is more than max_image_tokens 256"),
        ({"max_tiles": 100}, "max_tiles must be an integer from 1 to 64"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Lfm2VLProcessor(CONFIG, {}).num_tokens([(30, 30)], options)
