"""Llava, its relatives and Idefics: tokens after images are transformers', whatever is computed beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from quire.engine.messages import MediaItem, SamplingParams
from quire.server.media.processor import ProcessedImage
from quire.server.media.registry import load_processor
from tests.checkpoints import VOCAB_SIZE
from tests.in_process import InProcessEngine
from tests.llava_models import IMAGE_TOKEN_ID, MODELS, build_model

NUM_TOKENS = 6
BETWEEN = 11  # stands for the text around the runs of an image's tokens


def picture(width: int, height: int, seed: int) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def words(num: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(12, VOCAB_SIZE) for _ in range(num)]


WIDE, TALL, SQUARE, OTHER = picture(90, 40, 0), picture(31, 66, 1), picture(70, 70, 2), picture(90, 40, 3)
# prompts of text and images; the fourth begins as the second, and the fifth differs from it by its image only
PROMPTS: list[list[int | Image.Image]] = [
    words(23),
    [*words(5), WIDE, *words(9)],
    [TALL, *words(4), SQUARE, WIDE, *words(3)],
    [*words(5), WIDE, *words(9), *words(7, 1)],
    [*words(5), OTHER, *words(9)],
    [SQUARE, *words(6)],
]


class Prompts:
    """The prompts as the engine and as transformers get them."""

    def __init__(self, name: str, folder: str, prompts: Sequence[list[int | Image.Image]]):
        self.name, self.folder, self.processor = name, folder, load_processor(folder)
        self.ids: list[list[int]] = []
        self.media: list[list[MediaItem]] = []
        self.inputs: list[dict[str, torch.Tensor]] = []  # of transformers' forward
        for prompt in prompts:
            self._add(prompt)

    def _add(self, prompt: list[int | Image.Image]) -> None:
        pictures = [item for item in prompt if isinstance(item, Image.Image)]
        processed = iter(images := self.processor(pictures, {}) if pictures else [])
        ids, media = [], []
        for item in prompt:
            if isinstance(item, int):
                ids.append(item)
            else:
                media.append(self._item(item, image := next(processed), len(ids)))
                ids += span(image, self.processor.image_token)
        self.ids.append(ids)
        self.media.append(media)
        self.inputs.append(self._inputs(pictures, images) if pictures else {})

    def _item(self, picture: Image.Image, image: ProcessedImage, offset: int) -> MediaItem:
        key = f"{id(picture)}-{len(image.features)}"
        path = f"{self.folder}/{key}.features"
        save_file(image.features, path)
        length = len(span(image, self.processor.image_token))
        return MediaItem(key, offset, length, sum(image.counts), path, image.grid)

    def _inputs(self, pictures: list[Image.Image], images: list[ProcessedImage]) -> dict[str, Any]:
        pixels = [torch.from_numpy(image.features["pixel_values"]) for image in images]
        if self.name in ("mistral3", "pixtral"):
            return {"pixel_values": padded(pixels), "image_sizes": torch.tensor([p.shape[1:] for p in pixels])}
        if self.name == "llava":
            return {"pixel_values": torch.stack(pixels)}
        if self.name == "llava_onevision":
            sizes = torch.tensor([[picture.height, picture.width] for picture in pictures])
            number = torch.tensor([len(pixels)])
            return {"pixel_values": padded(pixels), "image_sizes": sizes, "batch_num_images": number}
        return {"pixel_values": torch.cat(pixels) if self.name.startswith("internvl") else torch.cat(pixels)[None]}


def span(image: ProcessedImage, token: str) -> list[int]:
    """The ids of an image: its tokens, and one for every text between them."""
    first, *parts = image.text.split(token)
    ids = [BETWEEN] if first else []
    for count, part in zip(image.counts, parts, strict=True):
        ids += [IMAGE_TOKEN_ID] * count + ([BETWEEN] if part else [])
    return ids


def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    size = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors))]
    out = torch.zeros(len(tensors), *size)
    for target, tensor in zip(out, tensors):
        target[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


def compare(model: Any, prompts: Prompts, results: list) -> None:
    """Greedy tokens are transformers' choice, with its log-probabilities."""
    for ids, inputs, result in zip(prompts.ids, prompts.inputs, results, strict=True):
        assert result.error is None and len(result.token_ids) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids + result.token_ids]), **inputs).logits[0, len(ids) - 1 : -1]
        expected, chosen = logits.float().log_softmax(-1), torch.tensor(result.token_ids)
        found = torch.tensor([entry.logprobs[0] for entry in result.logprobs])
        torch.testing.assert_close(found, expected.gather(-1, chosen[:, None])[:, 0], atol=1e-3, rtol=0)
        best = expected.max(-1).values - expected.gather(-1, chosen[:, None])[:, 0]
        assert best.max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_tokens_with_images(name, tmp_path):
    """Small steps cut images, few blocks preempt requests, and the second round finds prefixes."""
    model = build_model(name, tmp_path)
    prompts = Prompts(name, str(tmp_path), PROMPTS)
    longest = max(map(len, prompts.ids)) + NUM_TOKENS
    engine = InProcessEngine(
        str(tmp_path), block_size=4, max_num_batched_tokens=24, num_gpu_blocks_override=longest // 4 + 12
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    first = engine.generate(prompts.ids, sampling, media=prompts.media)
    again = engine.generate(prompts.ids, sampling, media=prompts.media)
    engine.close()
    compare(model, prompts, first)
    compare(model, prompts, again)
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
