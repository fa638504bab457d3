"""Tokens of images by their sizes alone equal those of the preprocessed images, for every family."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from quire.server.media.families.aya_vision import AyaVisionProcessor, Cohere2VisionProcessor
from quire.server.media.families.deepseek_ocr import DeepseekOCR2Processor, DeepseekOCRProcessor, UnlimitedOCRProcessor
from quire.server.media.families.gemma import Gemma3Processor, Gemma4Processor
from quire.server.media.families.granite_docling import GraniteDoclingProcessor
from quire.server.media.families.idefics3 import Idefics3Processor
from quire.server.media.families.inkling import Inkling2Processor, InklingProcessor
from quire.server.media.families.internvl import InternVLProcessor
from quire.server.media.families.kimi_k25 import KimiK25Processor
from quire.server.media.families.lfm2_vl import Lfm2VLProcessor
from quire.server.media.families.llava import LlavaProcessor
from quire.server.media.families.llava_next import Granite4VisionProcessor, LlavaNextProcessor
from quire.server.media.families.llava_onevision import LlavaOnevisionProcessor
from quire.server.media.families.minicpmv import MiniCPMVProcessor
from quire.server.media.families.pixtral import LightOnOCRProcessor, PixtralProcessor
from quire.server.media.families.qwen_vl import GlmVProcessor, Lfm3VLProcessor, PaddleOCRVLProcessor, QwenVLProcessor
from quire.server.media.registry import PROCESSORS

VISION = {"image_size": 28, "patch_size": 7, "pooling_kernel_size": 2, "scale_factor": 2}
CONFIG = {"vision_config": VISION, "scale_factor": 2, "mm_tokens_per_image": 4}
PINPOINTS = {"image_grid_pinpoints": [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]}
SQUARE = {"size": {"height": 28, "width": 28}}
FAMILIES = {
    "qwen": (QwenVLProcessor(CONFIG, {}), [{}, {"max_pixels": 5000}, {"min_pixels": 90_000}, {"detail": "low"}]),
    "paddleocr": (
        PaddleOCRVLProcessor(CONFIG, {"patch_size": 7}),
        [{}, {"min_pixels": 90_000}, {"detail": "low"}],
    ),
    "gemma3": (
        Gemma3Processor(CONFIG, {}),
        [{}, {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 5}],
    ),
    "gemma4": (Gemma4Processor(CONFIG, {}), [{}, {"max_soft_tokens": 70}, {"detail": "low"}]),
    "lfm2": (
        Lfm2VLProcessor(CONFIG, {"tile_size": 56, "min_image_tokens": 4, "max_image_tokens": 16}),
        [{}, {"do_image_splitting": False}, {"max_tiles": 4, "use_thumbnail": False}, {"detail": "low"}],
    ),
    "llava": (LlavaProcessor(CONFIG, {}), [{}]),
    "onevision": (LlavaOnevisionProcessor(CONFIG | PINPOINTS, {}), [{}, {"detail": "low"}]),
    "idefics3": (
        Idefics3Processor(CONFIG, {"size": {"longest_edge": 112}}),
        [{}, {"detail": "low"}, {"size": {"longest_edge": 56}}, {"do_image_splitting": True}],
    ),
    "internvl": (InternVLProcessor(CONFIG, SQUARE), [{}, {"max_patches": 3}, {"min_patches": 4}, {"detail": "low"}]),
    "aya": (AyaVisionProcessor(CONFIG, SQUARE), [{}, {"max_patches": 3}, {"min_patches": 4}, {"detail": "low"}]),
    "cohere": (Cohere2VisionProcessor(CONFIG, SQUARE), [{}, {"max_patches": 3}, {"detail": "low"}]),
    "llava-next": (LlavaNextProcessor(CONFIG | PINPOINTS, {}), [{}]),
    "pixtral": (PixtralProcessor(CONFIG, {}), [{}, {"size": {"longest_edge": 50}}, {"detail": "low"}]),
    "lighton": (LightOnOCRProcessor(CONFIG, {}), [{}, {"size": {"longest_edge": 50}}, {"detail": "low"}]),
    "glm": (GlmVProcessor(CONFIG, {"patch_size": 7}), [{}, {"max_pixels": 15_000}, {"detail": "low"}]),
    "kimi": (KimiK25Processor(CONFIG, {"patch_size": 7}), [{}, {"max_patches": 99}, {"detail": "low"}]),
    "minicpm": (
        MiniCPMVProcessor(CONFIG, {"patch_size": 7, "scale_resolution": 84}),
        [{}, {"max_slice_nums": 3}, {"detail": "low"}],
    ),
    "inkling": (InklingProcessor(CONFIG, {"size": {"height": 28, "width": 28}, "rescale_image_frac": 1.5}), [{}]),
    "inkling2": (Inkling2Processor(CONFIG, SQUARE), [{}]),
    "lfm3": (Lfm3VLProcessor(CONFIG, {"patch_size": 7}), [{}, {"max_pixels": 5000}]),
    "docling": (
        GraniteDoclingProcessor(CONFIG, SQUARE),
        [{}, {"max_patches": 40}, {"fine_route": True}, {"detail": "low"}],
    ),
    "granite": (Granite4VisionProcessor(CONFIG | PINPOINTS | {"downsample_rate": "1/2"}, {}), [{}]),
    "deepseek": (DeepseekOCRProcessor({}, {}), [{}, {"mode": "tiny"}, {"base_size": 64, "image_size": 32}]),
    "deepseek2": (DeepseekOCR2Processor({}, {}), [{}, {"mode": "small"}]),
    "unlimited": (UnlimitedOCRProcessor({}, {}), [{}, {"mode": "small"}, {"max_crops": 2}]),
}
CASES = [(name, i) for name, (_, options) in FAMILIES.items() for i in range(len(options))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "i"), CASES)
@given(sizes=st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=2))
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
def test_counts_by_size(name, i, sizes):
    processor, options = FAMILIES[name][0], FAMILIES[name][1][i]
    found = processor([Image.new("RGB", size) for size in sizes], options)
    assert processor.num_tokens(sizes, options) == [sum(one.counts) for one in found]


def test_every_family_has_a_case():
    classes = {type(processor).__name__ for processor, _ in FAMILIES.values()}
    assert {target.partition(":")[2] for target in PROCESSORS.values()} - {"llava_processor"} == classes - {
        "LlavaProcessor"
    }
