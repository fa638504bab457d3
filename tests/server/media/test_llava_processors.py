"""Preprocessing of Llava, its relatives and Idefics equals that of transformers' processors on Pillow."""

from __future__ import annotations

import json
import re
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
from tokenizers import AddedToken

from quire.server.media.families.idefics3 import Idefics3Processor
from quire.server.media.families.internvl import InternVLProcessor
from quire.server.media.families.llava import LlavaProcessor, llava_processor
from quire.server.media.families.llava_onevision import LlavaOnevisionProcessor
from quire.server.media.families.pixtral import PixtralProcessor
from quire.server.media.inputs import PreparedMedium, PreparedPart
from quire.server.media.processor import ProcessedImage
from quire.server.media.registry import load_processor
from quire.server.prompt.images import Illustrated
from tests.helpers.models.checkpoints import _byte_level

SIDE, PATCH = 28, 7
VISION = {"image_size": SIDE, "patch_size": PATCH}
GRIDS = [[SIDE * rows, SIDE * columns] for rows in range(1, 4) for columns in range(1, 4)]
IMAGES = st.builds(
    lambda width, height, seed: noise(width, height, seed), st.integers(4, 220), st.integers(4, 220), st.integers(0, 99)
)
SOME = settings(max_examples=40, deadline=None)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def transformers_class(model: str, kind: str, name: str) -> Any:
    """A class of transformers' module, although its lazy top level refuses it without torchvision."""
    from importlib import import_module

    return getattr(import_module(f"transformers.models.{model}.{kind}_{model}"), name)


@cache
def pixtral_text() -> Any:
    module = "transformers.models.pixtral.image_processing_pixtral"  # needs torchvision, for a function not called here
    with patch.dict(sys.modules, {module: SimpleNamespace(get_resize_output_image_size=None)}):
        return transformers_class("pixtral", "processing", "PixtralProcessor").replace_image_token


def expanded(image: ProcessedImage, token: str) -> str:
    counts = iter(image.counts)
    text = re.sub(re.escape(token), lambda match: token * next(counts), image.text)
    assert next(counts, None) is None
    return text


def same_pixels(found: np.ndarray, expected: np.ndarray, std: float = 0.26) -> None:
    """Within 1/255 of the range before the division by the standard deviation."""
    assert found.dtype == np.float32 and found.flags.c_contiguous
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1 / 255 / std


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), longest=st.integers(14, 120), merge=st.sampled_from([1, 2]))
def test_pixtral(images, longest, merge):
    assume(all(min(image.size) * longest >= max(image.size) for image in images))  # theirs would have no pixels
    config = {"vision_config": {"image_size": 56, "patch_size": PATCH}, "spatial_merge_size": merge}
    config["model_type"] = "mistral3" if merge > 1 else "llava"
    theirs = transformers_class("pixtral", "image_processing_pil", "PixtralImageProcessorPil")
    expected = theirs(size={"longest_edge": longest})(images, patch_size=PATCH * merge, do_pad=False)
    processor = PixtralProcessor(config, {"size": {"longest_edge": longest}})
    replaced = pixtral_text()
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    own = SimpleNamespace(patch_size=PATCH, spatial_merge_size=merge, **names)
    for i, image in enumerate(processor(images, {})):
        same_pixels(image.features["pixel_values"], expected["pixel_values"][i])
        assert expanded(image, "[IMG]") == replaced(own, expected, i)


@SOME
@given(images=st.lists(IMAGES, min_size=1, max_size=3), most=st.integers(1, 12), fewest=st.integers(1, 3))
def test_internvl(images, most, fewest):
    fewest = min(fewest, most)
    theirs = transformers_class("got_ocr2", "image_processing_pil", "GotOcr2ImageProcessorPil")
    options = {"min_patches": fewest, "max_patches": most, "crop_to_patches": True}
    expected = theirs(size={"height": SIDE, "width": SIDE})(images, **options)
    processor = InternVLProcessor({"vision_config": VISION}, {"size": {"height": SIDE, "width": SIDE}})
    replaced = transformers_class("internvl", "processing", "InternVLProcessor").replace_image_token
    names = {"image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    own, start = SimpleNamespace(image_seq_length=4, **names), 0
    for i, image in enumerate(processor(images, options)):
        count = expected["num_patches"][i]
        same_pixels(image.features["pixel_values"], np.stack(expected["pixel_values"][start : start + count]))
        assert expanded(image, "<IMG_CONTEXT>") == replaced(own, expected, i)
        start += count
    one = processor(images[:1], {"crop_to_patches": False})[0]
    same_pixels(
        one.features["pixel_values"], theirs(size={"height": SIDE, "width": SIDE})(images[0])["pixel_values"][0][None]
    )


@SOME
@given(image=IMAGES, others=st.lists(IMAGES, max_size=2), most=st.integers(1, 9))
def test_llava_onevision(image, others, most):
    """One image in tiles, several of them whole."""
    theirs = transformers_class("llava_onevision", "image_processing_pil", "LlavaOnevisionImageProcessorPil")
    size = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5, 0.4, 0.3]}
    reference = theirs(image_grid_pinpoints=GRIDS, **size)
    expected = reference([[image, *others]])
    config = {"image_grid_pinpoints": GRIDS, "vision_aspect_ratio": f"anyres_max_{most}"}
    processor = LlavaOnevisionProcessor({"vision_config": VISION} | config, size)
    module = transformers_class("llava_onevision", "processing", "LlavaOnevisionProcessor")
    own = module.__new__(module)
    own.num_image_tokens, own.vision_feature_select_strategy = (SIDE // PATCH) ** 2, "full"
    own.image_token, own.image_processor, own.vision_aspect_ratio = "<image>", reference, f"anyres_max_{most}"
    for i, found in enumerate(processor([image, *others], {})):
        same_pixels(found.features["pixel_values"], np.stack(expected["pixel_values"][i]))
        assert expanded(found, "<image>") == module.replace_image_token(own, expected, i)
        assert ("layout" in found.features) == (not others)


@SOME
@given(image=IMAGES, longest=st.integers(10, 120), splits=st.booleans())
def test_idefics3(image, longest, splits):
    theirs = transformers_class("idefics3", "image_processing_pil", "Idefics3ImageProcessorPil")
    options = {"size": {"longest_edge": longest}, "do_image_splitting": splits}
    expected = theirs(max_image_size={"longest_edge": SIDE})(image, return_row_col_info=True, **options)
    processor = Idefics3Processor({"vision_config": VISION}, {"max_image_size": {"longest_edge": SIDE}})
    found = processor([image], options)[0]
    same_pixels(found.features["pixel_values"], np.stack(expected["pixel_values"][0]), 0.5)
    names = {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"}
    own = SimpleNamespace(image_token="<image>", image_seq_len=4, **names)
    replaced = transformers_class("idefics3", "processing", "Idefics3Processor").replace_image_token
    assert expanded(found, "<image>") == replaced(own, expected, 0)


@SOME
@given(image=IMAGES)
def test_llava(image):
    """As CLIP's processor cuts images, and as Llava's own pads them."""
    config = {"vision_config": VISION | {"model_type": "clip_vision_model"}}
    cut = transformers_class("clip", "image_processing_pil", "CLIPImageProcessorPil")
    edges = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    found = LlavaProcessor(config, edges)([image], {})[0]
    same_pixels(found.features["pixel_values"], cut(**edges)(image)["pixel_values"][0])
    assert found.text == "<image>" and found.counts == [16]
    pad = transformers_class("llava", "image_processing_pil", "LlavaImageProcessorPil")(**edges, do_pad=True)
    found = LlavaProcessor(config, edges | {"image_processor_type": "LlavaImageProcessor", "do_pad": True})([image], {})
    same_pixels(found[0].features["pixel_values"], pad(image)["pixel_values"][0])


def test_llava_with_pixtral():
    vision = {"vision_config": {"model_type": "pixtral", "patch_size": 16, "image_size": 1024}, "model_type": "llava"}
    processor = llava_processor(vision, {})
    assert processor([noise(40, 17)], {})[0].counts == [3, 3]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PixtralProcessor, {"size": 30}, 'size must be {"longest_edge": N}'),
        (PixtralProcessor, {"size": {"longest_edge": 10**6}}, "longest_edge must be an integer from 1 to 1024"),
        (InternVLProcessor, {"max_patches": 0}, "max_patches must be an integer from 1 to 64"),
        (InternVLProcessor, {"max_patches": 2, "min_patches": 3}, "min_patches must be an integer from 1 to 2"),
        (InternVLProcessor, {"crop_to_patches": 1}, "crop_to_patches must be true or false"),
        (Idefics3Processor, {"max_image_size": {"longest_edge": 30}}, "must be the encoder's image_size, 28"),
        (Idefics3Processor, {"do_image_splitting": "no"}, "do_image_splitting must be true or false"),
    ],
)
def test_refused_options(kind, options, message):
    processor = kind({"vision_config": VISION}, {})
    assert set(options) <= processor.options
    with pytest.raises(ValueError, match=re.escape(message)):
        processor([noise(30, 20)], options)


@pytest.mark.parametrize("kind", [PixtralProcessor, InternVLProcessor, LlavaOnevisionProcessor, Idefics3Processor])
def test_expanded_ids(kind):
    """Runs repeated after tokenizing are what a tokenizer makes of the whole text."""
    processor = kind(
        {"vision_config": VISION, "image_grid_pinpoints": GRIDS},
        {"size": {"longest_edge": 56}} if kind in (PixtralProcessor, Idefics3Processor) else {},
    )
    images = processor([noise(90, 50), noise(30, 60)], {})
    special = set(re.findall(r"<[^<>]+>|\[[A-Z_]+\]", "".join(image.text for image in images)))
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in sorted(special)])
    token_id = tokenizer.token_to_id(processor.image_token)
    prepared = [
        PreparedMedium(str(i), 0, one.text, [PreparedPart(str(i), "", one.counts)]) for i, one in enumerate(images)
    ]
    inputs = [SimpleNamespace(kind="image", lease=SimpleNamespace(medium=one)) for one in prepared]
    model = SimpleNamespace(kinds={"image": SimpleNamespace(token=processor.image_token, token_id=token_id)})
    state = SimpleNamespace(images=model)
    joined = Illustrated.join(["A b: ", " and ", "?"], ["image"] * 2, inputs, state, "messages")
    ids, items = joined.expand(tokenizer.encode(joined.text).ids, "messages")
    texts = [expanded(image, processor.image_token) for image in images]
    assert ids == tokenizer.encode(f"A b: {texts[0]} and {texts[1]}?").ids
    for item, image in zip(items, images, strict=True):
        span = ids[item.offset : item.offset + item.length]
        assert span.count(token_id) == item.num_embeds == sum(image.counts)
        assert span[0] == span[-1] == token_id  # all of them


@pytest.mark.parametrize(
    ("kind", "settings", "high", "low"),
    [
        (PixtralProcessor, {}, 86 * 143, 44 * 74),  # 600 x 1000 and 307 x 512 pixels in patches of 7
        (InternVLProcessor, {}, 7 * 4, 4),
        (LlavaOnevisionProcessor, {}, 16 + 8 * (12 + 1), 17),
        (Idefics3Processor, {"size": {"longest_edge": 56}}, 5 * 4, 4),
    ],
)
def test_detail(kind, settings, high, low):
    processor = kind({"vision_config": VISION, "image_grid_pinpoints": GRIDS}, settings)
    images = [noise(1000, 600)]
    found = [sum(processor(images, {"detail": detail})[0].counts) for detail in ("auto", "high", "low")]
    assert found == [high, high, low]


def test_long_images():
    """An image of one row of pixels makes tokens, or is refused before it takes memory."""
    image = noise(30_000, 1)
    config = {"vision_config": VISION}
    for kind in (PixtralProcessor, InternVLProcessor, LlavaOnevisionProcessor, Idefics3Processor):
        processed = kind(config, {})([image], {})[0]
        assert sum(processed.counts) > 0
    vision = {"vision_config": {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"}}
    with pytest.raises(ValueError, match="more than 67108864 pixels"):
        LlavaProcessor(vision, {})([image], {})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (InternVLProcessor, {"size": {"height": 20, "width": 30}}, "only squares are"),
        (LlavaOnevisionProcessor, {"size": {"height": 20, "width": 20}}, "must be the encoder's image_size, 28"),
        (Idefics3Processor, {"max_image_size": {"longest_edge": 20}}, "must be the encoder's image_size, 28"),
        (PixtralProcessor, {"do_rescale": False}, "do_rescale false is not supported"),
    ],
)
def test_refused_settings(kind, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind({"vision_config": VISION}, settings)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Idefics3ForConditionalGeneration", Idefics3Processor),
        ("InternVLForConditionalGeneration", InternVLProcessor),
        ("LlavaForConditionalGeneration", LlavaProcessor),
        ("LlavaOnevisionForConditionalGeneration", LlavaOnevisionProcessor),
        ("Mistral3ForConditionalGeneration", PixtralProcessor),
        ("SmolVLMForConditionalGeneration", Idefics3Processor),
    ],
)
def test_architectures(architecture, kind, tmp_path):
    config = {"architectures": [architecture], "vision_config": VISION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(load_processor(tmp_path)) is kind
