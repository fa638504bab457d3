"""The encoders of Llava's relatives give transformers' embeddings of images, several at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.worker.models.vision.idefics3 import Idefics3Tower
from quire.worker.models.vision.intern_vit import InternVLTower
from quire.worker.models.vision.llava import LlavaTower
from quire.worker.models.vision.llava_onevision import LlavaOnevisionTower
from quire.worker.models.vision.pixtral import Mistral3Tower
from tests.helpers.models.llava_models import PATCH, SIDE, build_model
from tests.helpers.worker.towers import close, load_tower

TOWERS = {
    "mistral3": Mistral3Tower,
    "pixtral": LlavaTower,
    "llava": LlavaTower,
    "internvl": InternVLTower,
    "internvl-6b": InternVLTower,
    "llava_onevision": LlavaOnevisionTower,
    "idefics3": Idefics3Tower,
    "smolvlm": Idefics3Tower,
}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def fixed_images(tiles: list[int]) -> Iterator[dict[str, torch.Tensor]]:
    for i, count in enumerate(tiles):
        yield {"pixel_values": pixels(count, 3, SIDE, SIDE) + i}


@pytest.fixture
def built(request, tmp_path):
    model = build_model(request.param, tmp_path)
    with torch.inference_mode():
        yield model, load_tower(TOWERS[request.param], str(tmp_path))


@pytest.mark.parametrize("built", ["mistral3", "pixtral"], indirect=True)
def test_images_of_any_size(built):
    model, tower = built
    sizes = [(28, 56), (14, 14), (56, 42)]
    images = [{"pixel_values": pixels(3, *size)} for size in sizes]
    padded = torch.zeros(3, 3, 56, 56)
    for target, image in zip(padded, images):
        target[:, : image["pixel_values"].shape[1], : image["pixel_values"].shape[2]] = image["pixel_values"]
    expected = model.get_image_features(padded, image_sizes=torch.tensor(sizes)).pooler_output
    close(tower.encode(images), expected)
    close(tower.encode(images[1:2]), expected[1:2])


@pytest.mark.parametrize("built", ["llava"], indirect=True)
def test_one_square_per_image(built):
    model, tower = built
    images = [{"pixel_values": pixels(3, SIDE, SIDE) + i} for i in range(3)]
    stacked = torch.stack([image["pixel_values"] for image in images])
    close(tower.encode(images), list(model.get_image_features(stacked).pooler_output))


@pytest.mark.parametrize("built", ["internvl", "internvl-6b"], indirect=True)
def test_tiles(built):
    model, tower = built
    images = list(fixed_images([1, 3]))
    features = model.get_image_features(torch.cat([image["pixel_values"] for image in images])).pooler_output
    close(tower.encode(images), [features[:1].flatten(0, 1), features[1:].flatten(0, 1)])


@pytest.mark.parametrize("built", ["idefics3", "smolvlm"], indirect=True)
def test_tiles_of_idefics(built):
    model, tower = built
    images = list(fixed_images([1, 5]))
    expected = [model.get_image_features(image["pixel_values"][None]).pooler_output[0] for image in images]
    close(tower.encode(images), expected)


@pytest.mark.parametrize("built", ["llava_onevision"], indirect=True)
def test_tiles_without_padding(built):
    """A wide image, one whose rows are reduced (3 x 3 tiles with at most 4), and one of several."""
    model, tower = built
    side = SIDE // PATCH
    images = list(fixed_images([1 + 2, 1 + 9, 1]))
    images[0]["layout"] = torch.tensor([1, 2, 1, 0, side - 2, 2 * side])  # 15 x 55 in 30 x 60
    images[1]["layout"] = torch.tensor([3, 3, 0, 0, 8, 8])
    expected = [
        model.get_image_features(image["pixel_values"][None], image_sizes=torch.tensor([size])).pooler_output[0]
        for image, size in zip(images, [(15, 55), (90, 90)])
    ]
    one = model.get_image_features(
        images[2]["pixel_values"].expand(2, -1, -1, -1)[:, None],
        image_sizes=torch.tensor([[9, 9]] * 2),
        batch_num_images=torch.tensor([2]),
    ).pooler_output
    close(tower.encode(images), [*expected, one[0]])
