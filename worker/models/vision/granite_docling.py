"""The vision encoder of Granite Docling: SigLIP on the tiles of a page, several patches to an embedding, with features
of some layers for the decoder's first layers (deepstack).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.siglip import SIGLIP, VisionTransformer
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import activation, linear, merge_patches, named
from quire.worker.transformer.vision.tower import VisionTower

_MODEL = "model.vision_model"
_CONNECTOR = f"{_MODEL}.connector"
_DEFAULTS = SIGLIP | {
    "image_size": 512,
    "out_hidden_size": 1024,
    "scale_factor": 4,
    "deepstack_visual_indexes": [3, 7, 10],
    "use_fine_route": True,
}


def place_embeddings(side: int, size: int) -> torch.Tensor:
    """Return sines and cosines of the column, then of the row, of each embedding of a tile: `[side * side, size]`."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(size // 4, dtype=torch.float64) / (size // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((columns, rows), -1).flatten(0, 1).float()


class DeepMerger(nn.Module):
    """Maps merged features `[T, size]` of a layer to parts of embeddings `[T, out]`."""

    def __init__(self, size: int, out: int, name: str, weights: WeightFormat):
        super().__init__()
        self.norm = named(LayerNorm(size, 1e-5), f"{name}.layer_norm")
        self.linear_1 = linear(size, out, f"{name}.linear_1", weights)
        self.linear_2 = linear(out, out, f"{name}.linear_2", weights)
        self.activate = activation("gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.activate(self.linear_1(self.norm(x))))


class Path(nn.Module):
    """Merges `factor` x `factor` patches: coarse, or fine with half the factor."""

    def __init__(self, vision: dict[str, Any], factor: int, name: str, weights: WeightFormat):
        super().__init__()
        self.factor, out = factor, vision["out_hidden_size"]
        size = vision["hidden_size"] * factor**2
        self.projection = linear(size, out, f"{name}.projection", weights, bias=False)
        side = vision["image_size"] // vision["patch_size"] // factor
        with torch.device("cpu"):
            self.register_buffer("places", place_embeddings(side, out), persistent=False)
        names = [f"{name}.deepstack_mergers.{i}" for i in range(len(vision["deepstack_visual_indexes"]))]
        self.mergers = nn.ModuleList([DeepMerger(size, out, name, weights) for name in names])

    def merged(self, x: torch.Tensor) -> torch.Tensor:
        """Return the merged patches of tiles `[B, N, C]`."""
        side = round(x.shape[1] ** 0.5)
        return merge_patches(x.unflatten(1, (side, side)), self.factor)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return projected, placed features `[B, embeddings, out]` of tiles `[B, N, C]`."""
        merged = self.merged(x)
        projected = self.projection(merged.flatten(0, 1)).unflatten(0, merged.shape[:2])
        return projected + self.places.to(device=x.device, dtype=x.dtype)


class GraniteDoclingTower(VisionTower):
    """`pixel_values` of an image is `[tiles, 3, image_size, image_size]`, the whole page last; `fine` is there if its
    tiles take the fine path. An embedding has the columns of the final features, multiplied as the language model
    multiplies those of text, then those of each layer in `deepstack_visual_indexes`.
    """

    prefixes = (f"{_MODEL}.", "model.density_router.")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        deep = (_DEFAULTS | config["vision_config"])["deepstack_visual_indexes"]
        spec = super().read_spec(architecture, {"image_token_id": 100337} | config)
        return replace(spec, deep=tuple(range(len(deep))))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = _DEFAULTS | config["vision_config"]
        factor, out = vision["scale_factor"], vision["out_hidden_size"]
        self.deep, self.patches_per_embed = vision["deepstack_visual_indexes"], factor**2
        self.scale = config["text_config"].get("embedding_multiplier", 12.0)
        self.encoder = VisionTransformer(vision, weights, _MODEL, final_norm=True)
        self.norm_in = named(LayerNorm(vision["hidden_size"], 1e-5), f"{_CONNECTOR}.ln_in")
        self.coarse = Path(vision, factor, f"{_CONNECTOR}.coarse", weights)
        fine = vision["use_fine_route"]
        self.fine = Path(vision, factor // 2, f"{_CONNECTOR}.fine", weights) if fine else None
        self.norm_mid = named(LayerNorm(out, 1e-5), f"{_CONNECTOR}.ln_mid")
        self.linear = linear(out, out, f"{_CONNECTOR}.mlp_fc2", weights, bias=False)
        self.norm_out = named(LayerNorm(out, 1e-5), f"{_CONNECTOR}.ln_out")
        self.activate = activation("gelu")

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        final, taps = self.encoder.with_layers(torch.cat([image["pixel_values"] for image in images]), self.deep)
        final = self.norm_in(final.flatten(0, 1)).view_as(final)
        parts = zip(images, zip(*(x.split(tiles) for x in (final, *taps))))
        return [self._connect(*features, path=self._path(image)) for image, features in parts]

    def _path(self, image: dict[str, torch.Tensor]) -> Path:
        if "fine" in image and self.fine is None:
            raise ValueError("the model has no fine path")
        return self.fine if "fine" in image else self.coarse

    def _connect(self, final: torch.Tensor, *taps: torch.Tensor, path: Path) -> torch.Tensor:
        """Return the embeddings of an image, of whose tiles the features are `[B, N, C]`."""
        x = self.activate(self.norm_mid(path.project(final).flatten(0, 1)))
        x = self.norm_out(self.linear(x)) * self.scale
        deep = [merger(path.merged(tap).flatten(0, 1)) for merger, tap in zip(path.mergers, taps)]
        return torch.cat((x, *deep), -1)
