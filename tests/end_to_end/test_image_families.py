"""Models that read images, from the picture to the tokens: our processor, engine and worker against transformers' model
with transformers' own processor; for DeepSeek-OCR against the plain reading of the published code.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models import deepseek_ocr_reading as reading
from tests.helpers.models import ocr_models
from tests.helpers.models.image_prompts import PREPROCESSORS, Prompt, Reference, Writer, build, picture
from tests.helpers.models.judges import judge
from tests.helpers.models.llava_models import _GRIDS as GRIDS
from tests.helpers.models.llava_models import PREPROCESSORS as LLAVA
from tests.helpers.models.llava_models import SIDE
from tests.helpers.models.qwen_gemma_models import PATCH
from tests.server.media.test_llava_processors import transformers_class

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
PICTURES = [picture(0, 40, 30), picture(1, 25, 61), picture(2, 90, 31)]
Part = int | Image.Image


class Together(Writer):
    """Processes the pictures of a prompt at once, as the server does if their sizes depend on their number."""

    def __call__(self, *parts: Part, **options: Any) -> Prompt:
        prompt = Prompt()
        processed = iter(self.processor([part for part in parts if not isinstance(part, int)], options))
        for part in parts:
            if isinstance(part, int):
                prompt.token_ids.append(part)
            else:
                self._add(prompt, next(processed))
        return prompt


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(30, 250) for _ in range(length)]


def workload() -> list[list[Part]]:
    """Prompts with one picture, several, and none, for one batch. Text is between pictures, as templates write it:
    transformers takes neighbouring ones for one.
    """
    rng, (a, b, c) = random.Random(1), PICTURES
    return [
        [*text(rng, 20)],
        [*text(rng, 4), a, *text(rng, 6)],
        [b],
        [*text(rng, 3), c, *text(rng, 2), a, *text(rng, 1), b, *text(rng, 5)],
        [a, *text(rng, 3)],
        [*text(rng, 1)],
    ]


def pictures_of(parts: list[Part]) -> list[Image.Image]:
    return [part for part in parts if not isinstance(part, int)]


def run(folder: Path, prompts: list[Prompt], **settings: Any) -> list[Result]:
    engine = InProcessEngine(str(folder), block_size=4, max_num_seqs=8, max_num_batched_tokens=96, **settings)
    results = engine.generate([one.token_ids for one in prompts], GREEDY, media=[one.media for one in prompts])
    engine.close()
    return results


def check(model: Any, prompt: Prompt, result: Result) -> None:
    assert result.error is None and len(result.token_ids) == GREEDY.max_tokens
    logprobs = [entry.logprobs[0] for entry in result.logprobs]
    wrong, error = judge(model, prompt.token_ids, result.token_ids, logprobs)
    assert (wrong, error < 1e-3) == (0, True), f"{len(prompt.images)} images: {wrong} wrong, error {error}"


# ---- families of transformers


def pil(model: str, prefix: str, **settings: Any) -> Any:
    return transformers_class(model, "image_processing_pil", f"{prefix}ImageProcessorPil")(**settings)


def own_inputs(name: str, pictures: list[Image.Image]) -> dict[str, Any]:
    """What transformers' processor on Pillow makes of the pictures of one prompt."""
    if not pictures:
        return {}
    if name in QWEN:
        sizes = PREPROCESSORS[name]
        size = {"shortest_edge": sizes["min_pixels"], "longest_edge": sizes["max_pixels"]}
        kind = ("paddleocr_vl", "PaddleOCRVL") if name == "paddleocr_vl" else ("qwen2_vl", "Qwen2VL")
        found = pil(*kind, patch_size=PATCH, size=size)(pictures)
    elif name.startswith("gemma4"):
        found = pil("gemma4", "Gemma4", patch_size=PATCH, pooling_kernel_size=2, **PREPROCESSORS[name])(pictures)
    elif name == "gemma3":
        square = {"height": 32, "width": 32}
        found = pil("gemma3", "Gemma3", size=square, image_mean=[0.5] * 3, image_std=[0.5] * 3)(pictures)
    elif name == "llava_onevision":
        return _llava_onevision(pictures)
    else:
        prefix = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[name]
        options = {"max_image_size": {"longest_edge": SIDE}} | LLAVA[name]
        found = pil(name, prefix, **options)([pictures])
        found = {key: found[key] for key in ("pixel_values", "pixel_attention_mask")}
    return {
        key: torch.from_numpy(np.stack(list(found[key])))
        for key in found
        if key.startswith(("pixel", "image_grid", "image_pos"))
    }


def _llava_onevision(pictures: list[Image.Image]) -> dict[str, Any]:
    found = pil("llava_onevision", "LlavaOnevision", size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=GRIDS)(
        [pictures]
    )
    tiles = [torch.from_numpy(np.stack(one)) for one in found["pixel_values"]]
    most = max(len(one) for one in tiles)
    padded = torch.stack([torch.cat((one, one.new_zeros(most - len(one), *one.shape[1:]))) for one in tiles])
    return {
        "pixel_values": padded,
        "image_sizes": torch.tensor([[one.height, one.width] for one in pictures]),
        "batch_num_images": torch.tensor([len(pictures)]),
    }


QWEN = "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "paddleocr_vl"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QWEN, "gemma3", "gemma4", "llava_onevision", "idefics3", "smolvlm"])
def test_from_the_picture_to_the_tokens(name, tmp_path):
    model = build(name, tmp_path)
    write = Together(tmp_path, tmp_path)
    parts = workload()
    prompts = [write(*one) for one in parts]
    for one, prompt, result in zip(parts, prompts, run(tmp_path, prompts, max_model_len="400"), strict=True):
        reference = Reference(name, model, [])
        reference.inputs = own_inputs(name, pictures_of(one))
        check(reference, prompt, result)


def test_lfm2_vl(tmp_path):
    """With our pixels: transformers' processor needs torchvision. Images that keep their shape, and tiles."""
    model, rng = build("lfm2_vl", tmp_path), random.Random(3)
    write, (a, b, c) = Writer(tmp_path, tmp_path), PICTURES
    prompts = [
        write(*text(rng, 9)),
        write(a, *text(rng, 4)),
        write(*text(rng, 3), c, *text(rng, 2), picture(3, 20, 14), *text(rng, 1)),
        write(b, 31, b, do_image_splitting=False),
    ]
    assert [len(one.counts) for one in prompts[2].images] == [4, 1]  # tiles and the whole, the whole
    for prompt, result in zip(prompts, run(tmp_path, prompts, max_model_len="400"), strict=True):
        check(Reference("lfm2_vl", model, prompt.images), prompt, result)


# ---- the DeepSeek-OCR family


def test_deepseek_ocr(tmp_path):
    """The files as deepseek-ai/DeepSeek-OCR has them, with remote code that nobody loads. Pages with tiles, without,
    and squeezed, as its modes make them.
    """
    tensors = reading.write_checkpoint(tmp_path)
    write = Writer(tmp_path, tmp_path)
    rng = random.Random(2)
    a, b, c = PICTURES
    modes: list[dict[str, Any]] = [
        {"base_size": 128, "image_size": 64},  # as gundam, in tiles of the larger pictures
        {"base_size": 128, "crop_mode": False},
        {"image_size": 64, "crop_mode": False},
    ]
    prompts = [write(*text(rng, 9))]
    for mode in modes:
        prompts.append(write(a, *text(rng, 4), **mode))
        prompts.append(write(*text(rng, 3), b, *text(rng, 1), c, *text(rng, 2), **mode))
    assert "pixel_values_local" in prompts[2].images[1].features
    for prompt, result in zip(prompts, run(tmp_path, prompts, max_model_len="200"), strict=True):
        pages = [{key: torch.from_numpy(v) for key, v in one.features.items()} for one in prompt.images]

        def model(ids: torch.Tensor, pages: list[Any] = pages) -> Any:
            return SimpleNamespace(logits=reading.logits(tensors, ids[0].tolist(), pages)[None])

        check(model, prompt, result)


class OwnPages:
    """transformers' DeepSeek-OCR-2 with its own processor's pages."""

    def __init__(self, model: Any, pictures: list[Image.Image], **options: Any):
        self.model, self.inputs = model, {}
        if pictures:
            found = pil("deepseek_ocr2", "DeepseekOcr2", size={"height": 768, "width": 768}, tile_size=768)(
                pictures, return_tensors="pt", **options
            )
            self.inputs = {key: found[key] for key in found if key.startswith(("pixel_values", "num_local"))}

    def __call__(self, ids: torch.Tensor) -> Any:
        return self.model(ids, use_cache=False, **self.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [False, True])
def test_deepseek_ocr_2(tiles, tmp_path):
    model = ocr_models.build_model("deepseek_ocr2", tmp_path)
    options = {"base_size": 768, "image_size": 768, "crop_mode": tiles}
    write, rng = Writer(tmp_path, tmp_path), random.Random(3)
    parts: list[list[Part]] = [text(rng, 7), [PICTURES[0], *text(rng, 3)]]
    parts.append([*text(rng, 2), picture(5, 900, 400), *text(rng, 2)] if tiles else [*PICTURES, *text(rng, 2)])
    prompts = [write(*one, **options) for one in parts]
    assert any("grid" in page.features for prompt in prompts for page in prompt.images) == tiles
    for one, prompt, result in zip(parts, prompts, run(tmp_path, prompts, max_model_len="900"), strict=True):
        check(OwnPages(model, pictures_of(one), crop_to_patches=tiles), prompt, result)


def test_the_image_is_what_decides(tmp_path):
    """Equal ids with other pictures give other tokens: no block and no embedding is taken for another picture's."""
    build("qwen2_vl", tmp_path)
    write, rng = Writer(tmp_path, tmp_path), random.Random(4)
    rest = text(rng, 9)
    prompts = [write(picture(seed, 40, 30), *rest) for seed in (0, 1, 0)]
    assert prompts[0].token_ids == prompts[1].token_ids
    engine = InProcessEngine(str(tmp_path), block_size=4, max_model_len="200")
    first, second, again = [engine.generate([one.token_ids], GREEDY, media=[one.media])[0] for one in prompts]
    engine.close()
    assert first.token_ids == again.token_ids != second.token_ids
    assert second.num_cached_tokens == 0 < again.num_cached_tokens
