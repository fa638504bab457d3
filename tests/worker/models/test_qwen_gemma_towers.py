"""The encoders of Qwen-VL and Gemma give transformers' embeddings of images of several sizes at once."""

from __future__ import annotations

import math

import pytest
import torch

from quire.worker.models.vision.gemma3 import Gemma3Tower
from quire.worker.models.vision.gemma4 import Gemma4Tower
from quire.worker.models.vision.paddleocr_vl import PaddleOCRVLTower
from quire.worker.models.vision.qwen2_5_vl import Qwen2_5VLTower, windows_of
from quire.worker.models.vision.qwen2_vl import Qwen2VLTower
from quire.worker.models.vision.qwen3_vl import Qwen3VLTower
from quire.worker.models.vision.qwen_vl import in_groups
from tests.helpers.models.qwen_gemma_models import GEMMA3_SIDE, PATCH, build_model
from tests.helpers.worker.towers import close, load_tower

TOWERS = {
    "qwen2_vl": Qwen2VLTower,
    "qwen2_5_vl": Qwen2_5VLTower,
    "qwen3_vl": Qwen3VLTower,
    "paddleocr_vl": PaddleOCRVLTower,
    "gemma3": Gemma3Tower,
    "gemma4": Gemma4Tower,
    "gemma4-large": Gemma4Tower,
}
PLACES = {"qwen3_vl": "model.", "gemma4": "model.", "gemma4-large": "model."}  # in the files


@pytest.fixture
def built(request, tmp_path):
    name = request.param
    model = build_model(name, tmp_path)
    with torch.inference_mode():
        yield model, load_tower(TOWERS[name], str(tmp_path), PLACES.get(name, ""))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def pixels_and_grids() -> tuple[torch.Tensor, torch.Tensor]:
    """A video of three pairs of frames among images; rows and columns are not multiples of a window."""
    grids = torch.tensor([[1, 6, 8], [1, 10, 14], [3, 4, 6], [1, 2, 2]])
    return random(int(grids.prod(1).sum()), 3 * 2 * PATCH**2), grids


@pytest.mark.parametrize("built", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_qwen(built):
    model, tower = built
    pixels, grids = pixels_and_grids()
    reference = model.get_image_features(pixels, grids)
    deep = getattr(reference, "deepstack_features", [])
    expected = [torch.cat(parts, -1) for parts in zip(reference.pooler_output, *deep)]
    parts = pixels.view(-1, 3, 2, PATCH**2).split(grids.prod(1).tolist())
    images = [{"pixel_values": part, "grid": grid} for part, grid in zip(parts, grids)]
    close(tower.encode(images), expected)
    close(tower.encode(images[1:2]), expected[1:2])


@pytest.mark.parametrize("built", ["paddleocr_vl"], indirect=True)
def test_paddleocr(built):
    """Grids that are smaller, larger and longer than the square of learned positions."""
    model, tower = built
    grids = torch.tensor([[1, 6, 8], [1, 10, 4], [1, 2, 2]])
    lengths = grids.prod(1).tolist()
    pixels = random(sum(lengths), 3, PATCH, PATCH)
    expected = model.get_image_features(pixels, grids).pooler_output
    images = []
    for part, grid in zip(pixels.split(lengths), grids):
        _, rows, columns = grid.tolist()
        order = in_groups(torch.arange(rows * columns).view(rows, columns, 1), 2).flatten()
        images.append({"pixel_values": part[order].view(-1, 3, 1, PATCH**2), "grid": grid})
    close(tower.encode(images), expected)


@pytest.mark.parametrize("built", ["qwen2_vl"], indirect=True)
def test_one_frame_stands_for_all(built):
    _, tower = built
    frame = random(8, 3, 1, PATCH**2)
    grid = torch.tensor([1, 2, 4])
    doubled = {"pixel_values": frame.expand(-1, -1, 2, -1), "grid": grid}
    close(tower.encode([{"pixel_values": frame, "grid": grid}]), tower.encode([doubled]))


def test_windows():
    """3 x 3 groups in windows of 2 x 2, then a frame that is smaller than a window."""
    found = [window.tolist() for window in windows_of([(1, 3, 3), (1, 1, 2)], 2)]
    assert found == [[8], [2, 5], [6, 7], [0, 1, 3, 4], [9, 10]]


@pytest.mark.parametrize("built", ["gemma3"], indirect=True)
def test_gemma3(built):
    model, tower = built
    pixels = random(3, 3, GEMMA3_SIDE, GEMMA3_SIDE)
    reference = model.get_image_features(pixels).pooler_output
    images = [{"pixel_values": pixels[:1]}, {"pixel_values": pixels[1:]}]
    close(tower.encode(images), [reference[0], reference[1:].flatten(0, 1)])


@pytest.mark.parametrize("built", ["gemma4", "gemma4-large"], indirect=True)
def test_gemma4(built):
    model, tower = built
    grids = [(4, 6), (2, 2), (6, 2)]
    images = [
        {"pixel_values": random(math.prod(grid), 3 * PATCH**2).sigmoid(), "grid": torch.tensor(grid)} for grid in grids
    ]
    padded, places = torch.zeros(3, 24, 3 * PATCH**2), torch.full((3, 24, 2), -1)
    for i, (rows, columns) in enumerate(grids):
        padded[i, : rows * columns] = images[i]["pixel_values"]
        places[i, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    close(tower.encode(images), model.get_image_features(padded, places).pooler_output)
