"""The encoders of the DeepSeek-OCR family give transformers' embeddings of images, several at once."""

from __future__ import annotations

import json

import pytest
import torch

from quire.worker.layers.linear import Linear
from quire.worker.models.vision import sam
from quire.worker.models.vision.deepseek_ocr import DeepseekOCR2Tower, DeepseekOCRTower
from quire.worker.transformer.vision.tower import VisionTower
from quire.worker.weights.checkpoint import Checkpoint, Placement
from tests.helpers.models import deepseek_ocr_reading
from tests.helpers.models.ocr_models import build_model

TOWERS = {"unlimited_ocr": DeepseekOCRTower, "deepseek_ocr2": DeepseekOCR2Tower}
UNUSED = "model.vision_model.embeddings.patch_embedding.weight"  # SAM's features take its place
SIDE, TILE = 96, 64  # of the views and of the tiles; the tables of positions are made for 96 pixels


def load_tower(name: str, folder: str) -> VisionTower:
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        tower = TOWERS.get(name, DeepseekOCRTower)(json.load(file)).eval()
    with Checkpoint(folder) as checkpoint:
        for parameter in tower.parameters():
            for part in parameter.parts:
                checkpoint.fill(Placement(part, parameter), False)
        used = {part.name for parameter in tower.parameters() for part in parameter.parts}
        assert used == {name for name in checkpoint.position if name.startswith(tower.prefixes)} - {UNUSED}
    for module in tower.modules():
        if isinstance(module, Linear):
            module.finalize()
    return tower


def page(seed: int, columns: int = 0, rows: int = 0, side: int = SIDE) -> dict[str, torch.Tensor]:
    """Features of an image with columns * rows tiles."""
    generator = torch.Generator().manual_seed(seed)
    features = {"pixel_values": torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8, generator=generator)}
    if columns:
        shape = (columns * rows, TILE, TILE, 3)
        features["pixel_values_local"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        features["grid"] = torch.tensor([columns, rows])
    return features


def reference(model, name: str, image: dict[str, torch.Tensor]) -> torch.Tensor:
    def scaled(pixels: torch.Tensor) -> torch.Tensor:
        return pixels.permute(0, 3, 1, 2) / 127.5 - 1

    arguments = {"pixel_values": scaled(image["pixel_values"])}
    if "grid" in image:
        tiles = image["pixel_values_local"]
        arguments |= {"pixel_values_local": scaled(tiles), "num_local_patches": [len(tiles)]}
        arguments |= {"patches_grid": [image["grid"].tolist()]} if name == "unlimited_ocr" else {}
    return model.get_image_features(**arguments).pooler_output[0]


@pytest.mark.parametrize("name", TOWERS)
def test_equals_transformers(name, tmp_path, monkeypatch):
    model = build_model(name, tmp_path)
    images = [page(0), page(1, 3, 2), page(2, 1, 2), page(3, side=128)]
    with torch.inference_mode():
        tower = load_tower(name, str(tmp_path))
        expected = [reference(model, name, image) for image in images]
        for scores, pixels in ((sam._SCORES, 4 << 20), (500, 2 * TILE**2), (1, 1)):  # in smaller and smaller parts
            monkeypatch.setattr(sam, "_SCORES", scores)
            monkeypatch.setattr("quire.worker.models.vision.deepseek_ocr._MAX_PIXELS", pixels)
            found = tower.encode(images)
            assert len(found) == len(images)
            for ours, theirs in zip(found, expected):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_equals_a_plain_reading_of_the_published_code(tmp_path):
    tensors = deepseek_ocr_reading.write_checkpoint(tmp_path)
    images = [page(4, side=320), page(5, 2, 1, side=128)]
    with torch.inference_mode():
        found = load_tower("deepseek_ocr", str(tmp_path)).encode(images)
        for ours, features in zip(found, images):
            torch.testing.assert_close(ours, deepseek_ocr_reading.page(tensors, features), rtol=1e-4, atol=1e-4)
