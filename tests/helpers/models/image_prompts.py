"""Makes prompts with real images for tiny models without a tokenizer, and transformers' answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save_file

from quire.engine.messages import MediaItem
from quire.server.media.families.llava_next import LlavaNextProcessor
from quire.server.media.processor import ProcessedImage
from quire.server.media.registry import load_processor
from tests.helpers.models import document_models, llava_models, ocr_models, qwen_gemma_models
from tests.helpers.models.llava_models import IMAGE_TOKEN_ID

_SMALL = {"min_pixels": 64, "max_pixels": 64 * 24}  # of Qwen: up to 24 tokens of 8 x 8 pixels
# preprocessor_config.json
_QWEN = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "paddleocr_vl"
PREPROCESSORS = dict.fromkeys(_QWEN, _SMALL) | {
    "paddleocr_vl": _SMALL | {"patch_size": 4},
    "gemma4": {"max_soft_tokens": 70},
    "gemma4-large": {"max_soft_tokens": 70},
    "unlimited_ocr": {"base_size": 128, "image_size": 64},
    "deepseek_ocr2": {"base_size": 768, "crop_mode": False},
}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return colored noise of few frequencies, which resizing keeps."""
    rough = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


@dataclass
class Prompt:
    """Holds token ids with images among them."""

    token_ids: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)


class Writer:
    """Makes prompts of the model in `folder`: numbers are token ids, pictures are processed as the server does."""

    def __init__(self, folder: str | Path, store: str | Path):
        self.processor, self.store = load_processor(folder), Path(store)

    def __call__(self, *parts: int | Image.Image, **options: Any) -> Prompt:
        prompt = Prompt()
        for part in parts:
            if isinstance(part, int):
                prompt.token_ids.append(part)
            else:
                image = self.processor([part], options)[0]
                if isinstance(self.processor, LlavaNextProcessor):
                    image.features["size"] = np.array([part.height, part.width])  # for transformers' model
                self._add(prompt, image)
        return prompt

    def _add(self, prompt: Prompt, image: ProcessedImage) -> None:
        """Add the tokens of an image; each text between runs of image tokens is one token."""
        ids, runs = [], []
        pieces = image.text.split(self.processor.image_token)
        for piece, count in zip(pieces, [*image.counts, 0], strict=True):
            ids += [20 + len(piece) % 7] * bool(piece)
            runs += [(len(ids), len(ids) + count)] * bool(count)
            ids += [IMAGE_TOKEN_ID] * count
        first, last = len(prompt.token_ids) + runs[0][0], len(prompt.token_ids) + runs[-1][1]
        prompt.token_ids += ids
        prompt.images.append(image)
        path, key = self._write(image)
        prompt.media.append(MediaItem(key, first, last - first, sum(image.counts), path, image.grid))

    def _write(self, image: ProcessedImage) -> tuple[str, str]:
        digest = hashlib.sha256()
        for name, values in sorted(image.features.items()):
            digest.update(name.encode() + values.tobytes() + str(values.shape).encode())
        path = self.store / f"{digest.hexdigest()}.safetensors"
        save_file(image.features, path)
        return str(path), digest.hexdigest()


def build(name: str, folder: str | Path, dtype: str = "float32") -> Any:
    """Write the checkpoint of a family and its preprocessor into `folder`, and return transformers' model, in float32.
    It never writes the image token, which transformers would take for a placeholder.
    """
    families = (one for one in (document_models, llava_models, qwen_gemma_models) if name in one.MODELS)
    model = next(families, ocr_models).build_model(name, folder)
    model.lm_head.weight.data[IMAGE_TOKEN_ID] = 0.0
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    document_models.correct_names(name, folder)
    model.float()  # the same weights
    path = Path(folder, "preprocessor_config.json")
    if not path.exists():
        path.write_text(json.dumps(PREPROCESSORS.get(name, {})))
    return model


class Reference:
    """Calls transformers' model with token ids and the images of a prompt, for `judge`."""

    def __init__(self, name: str, model: Any, images: Sequence[ProcessedImage]):
        self.name, self.model = name, model
        self.inputs = _inputs(name, [{key: torch.from_numpy(v) for key, v in one.features.items()} for one in images])

    def rounding(self, token_ids: Sequence[int]) -> float:
        """Return how far float32 moves a log-probability of transformers' model from float64's: random weights may
        enlarge the rounding of any order of sums.
        """
        ids, inputs, found = torch.tensor([token_ids]), self.inputs, []
        with torch.inference_mode():
            try:
                for dtype in (torch.float32, torch.float64):
                    self.model.to(dtype)
                    self.inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
                    found.append(self(ids).logits.double().log_softmax(-1))
            finally:
                self.model.float()
                self.inputs = inputs
        return float((found[0] - found[1]).abs().max())

    def __call__(self, token_ids: torch.Tensor) -> Any:
        kinds = (token_ids == self.model.config.image_token_id).int()
        inputs = dict(self.inputs)
        if inputs and (self.name in _QWEN or self.name.startswith("glm")):
            inputs["mm_token_type_ids"] = kinds
        if self.name.startswith("gemma3"):
            inputs["token_type_ids"] = kinds
        if inputs and self.name.startswith("gemma4"):
            inputs["mm_token_type_ids"] = kinds
        return self.model(token_ids, use_cache=False, **inputs)


def _inputs(name: str, images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the images as inputs of transformers' model."""
    if not images:
        return {}
    pixels = [image["pixel_values"] for image in images]
    if name.startswith(("qwen", "glm", "lfm3")):
        frames = [one.expand(-1, -1, 2, -1).flatten(1) for one in pixels]
        return {"pixel_values": torch.cat(frames), "image_grid_thw": torch.stack([image["grid"] for image in images])}
    if name.startswith("minicpm"):
        flat = torch.cat(pixels).permute(1, 2, 0, 3).flatten(2)  # columns of all patches next to each other
        return {"pixel_values": flat[None], "target_sizes": torch.cat([image["grids"] for image in images])}
    if name == "kimi_k25":
        return _kimi_k25(images)
    if name in ("mistral3", "pixtral", "mistral_large4", "lighton_ocr"):
        sizes = torch.tensor([one.shape[1:] for one in pixels])
        padded = torch.zeros(len(pixels), 3, *sizes.max(0).values.tolist())
        for target, one in zip(padded, pixels):
            target[:, : one.shape[1], : one.shape[2]] = one
        return {"pixel_values": padded, "image_sizes": sizes}
    if name.startswith("gemma4"):
        return _gemma4(images)
    if name in ("granite4_vision", "llava_next"):
        return _llava_next(images)
    if name == "granite_docling":
        tiles = torch.cat(pixels)[None]
        fine = {"tile_fine_mask": torch.ones(1, dtype=torch.bool)} if "fine" in images[0] else {}
        return {"pixel_values": tiles, "pixel_attention_mask": torch.ones(tiles.shape[:2], dtype=torch.bool)} | fine
    if "ocr" in name and name != "qianfan_ocr":
        return _ocr(name, images)
    if name == "lfm2_vl":
        return _lfm2_vl(images)
    if name == "inkling2":
        grids = [torch.tensor([1, *image["grid"].tolist()]) for image in images]
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}
    if name == "inkling":  # each square is shown in two frames
        return {"pixel_values": torch.cat(pixels)[:, None].expand(-1, 2, -1, -1, -1)}
    if name == "llava":
        return {"pixel_values": torch.stack(pixels)}
    return {"pixel_values": torch.cat(pixels)}


def _kimi_k25(images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the patches row by row; the server's are in groups of four."""
    grids, found = torch.stack([image["grid"] for image in images]), []
    for image in images:
        _, rows, columns = image["grid"].tolist()
        groups = image["pixel_values"].view(rows // 2, columns // 2, 2, 2, 3, -1).transpose(1, 2)
        patches = groups.reshape(rows * columns, 3, -1)
        found.append(patches.unflatten(2, (document_models.PATCH, document_models.PATCH)))
    return {"pixel_values": torch.cat(found), "image_grid_thw": grids}


def _lfm2_vl(images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    grids = torch.cat([image["grids"] for image in images])
    parts = torch.cat([image["pixel_values"] for image in images]).split(grids.prod(1).tolist())
    padded = torch.zeros(len(parts), max(map(len, parts)), parts[0].shape[1])
    mask = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for i, part in enumerate(parts):
        padded[i, : len(part)], mask[i, : len(part)] = part, 1
    return {"pixel_values": padded, "spatial_shapes": grids, "pixel_attention_mask": mask}


def _llava_next(images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the tiles, and sizes of images that are padded as theirs were."""
    most = max(len(image["pixel_values"]) for image in images)
    padded = torch.zeros(len(images), most, *images[0]["pixel_values"].shape[1:])
    for target, image in zip(padded, images):
        target[: len(image["pixel_values"])] = image["pixel_values"]
    return {"pixel_values": padded, "image_sizes": torch.stack([image["size"] for image in images])}


def _gemma4(images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    longest = max(len(image["pixel_values"]) for image in images)
    padded = torch.zeros(len(images), longest, images[0]["pixel_values"].shape[1])
    places = torch.full((len(images), longest, 2), -1)
    for i, image in enumerate(images):
        rows, columns = image["grid"].tolist()
        padded[i, : rows * columns] = image["pixel_values"]
        places[i, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return {"pixel_values": padded, "image_position_ids": places}


def _ocr(name: str, images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    def scaled(pixels: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(pixels).permute(0, 3, 1, 2) / 127.5 - 1

    inputs: dict[str, Any] = {"pixel_values": scaled([image["pixel_values"] for image in images])}
    if tiles := [image["pixel_values_local"] for image in images if "grid" in image]:
        counts = [len(image.get("pixel_values_local", ())) for image in images]
        inputs |= {"pixel_values_local": scaled(tiles), "num_local_patches": counts}
        if name == "unlimited_ocr":
            inputs["patches_grid"] = [image["grid"].tolist() if "grid" in image else [1, 1] for image in images]
    return inputs
