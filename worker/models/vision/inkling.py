"""The vision encoder of Inkling: squares of pixels, each of which is a token, pass linear layers that join ever larger
parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import RMSNorm
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import linear, named
from quire.worker.transformer.vision.tower import VisionTower

_DEFAULTS = {"patch_size": 40, "temporal_patch_size": 2, "num_channels": 3, "n_layers": 24}
_IMAGE_TOKEN = 200054
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Scale:
    """The part of a square that a vector is made of: `frames` of `side` pixels."""

    frames: int
    side: int
    width: int  # of the vector

    @property
    def pixels(self) -> int:
        return self.frames * self.side**2


def scales(frames: int, side: int, channels: int, num_layers: int) -> list[Scale]:
    """Return the parts before and after each layer. They come from a list that starts with a pixel: each next part is
    larger by a prime factor, first of the side and then of the frames, the largest factor first. The logarithms of the
    chosen parts' sizes are about evenly spaced.
    """
    steps, own = [Scale(1, 1, channels)], 1
    for factor in _factors(side):
        own *= factor
        steps.append(Scale(1, own, -(-(own**2) * channels // 64) * 64))
    own = 1
    for factor in _factors(frames):
        own *= factor
        steps.append(Scale(own, side, side**2 * channels * own * 64))
    wanted = [math.log(frames * side**2 * channels) * i / num_layers for i in range(num_layers + 1)]
    cost = [[abs(ideal - math.log(step.pixels)) for step in steps] for ideal in wanted]
    if num_layers >= len(steps):
        chosen = [min(range(len(steps)), key=row.__getitem__) for row in cost]
    else:
        chosen = _cheapest_places(cost)
    chosen[0], chosen[-1] = 0, len(steps) - 1
    return [steps[place] for place in chosen]


def _cheapest_places(cost: list[list[float]]) -> list[int]:
    """Return one increasing column index per row of `cost` so that the sum of their costs is least."""
    ways: list[tuple[float, list[int]]] = [(0.0, [])]  # the cheapest that end before each place
    for row in cost:
        own = [(math.inf, [])]
        for place, price in enumerate(row):
            before = ways[min(place, len(ways) - 1)]
            own.append(min(own[-1], (before[0] + price, [*before[1], place]), key=itemgetter(0)))
        ways = own
    return ways[-1][1]


def _factors(number: int) -> Iterator[int]:
    """Yield the prime factors, the largest first."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return reversed(found)


class Fold(nn.Module):
    """Joins the vectors of neighbouring parts `[N, t, h, w, C]` and maps them to one; then a norm and GELU, but for the
    last layer.
    """

    def __init__(self, small: Scale, large: Scale, index: int, size: int | None, weights: WeightFormat):
        super().__init__()
        self.frames, self.side = large.frames // small.frames, large.side // small.side
        width = size or large.width
        inputs = small.width * self.frames * self.side**2
        self.linear = linear(inputs, width, f"visual.layers.linear_{index}", weights, bias=False)
        self.norm = None if size else named(RMSNorm(width, _EPS), f"visual.layers.norm_{index}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t, s = self.frames, self.side
        number, frames, height, width, _ = x.shape
        x = x.reshape(number, frames // t, t, height // s, s, width // s, s, -1).permute(0, 1, 3, 5, 2, 4, 6, 7)
        x = self.linear(x.flatten(4).flatten(0, 3)).view(*x.shape[:4], -1)
        return x if self.norm is None else F.gelu(self.norm(x))


class InklingTower(VisionTower):
    """`pixel_values` of an image is `[tokens, side, side, 3]`; all frames of a square show the same."""

    prefixes = ("visual.",)

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return super().read_spec(architecture, {"image_token_id": _IMAGE_TOKEN} | config)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = _DEFAULTS | config["vision_config"]
        size, self.frames = config["text_config"]["hidden_size"], vision["temporal_patch_size"]
        steps = scales(self.frames, vision["patch_size"], vision["num_channels"], vision["n_layers"])
        last = len(steps) - 2
        self.layers = nn.Sequential(
            *(Fold(*pair, i, size if i == last else None, weights) for i, pair in enumerate(pairwise(steps)))
        )
        self.norm = named(RMSNorm(size, _EPS), "visual.final_norm")

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        counts = [len(image["pixel_values"]) for image in images]
        pixels = torch.cat([image["pixel_values"] for image in images]).to(self.norm.weight.dtype)
        squares = pixels[:, None].expand(-1, self.frames, -1, -1, -1)
        return list(self.norm(self.layers(squares).flatten(1)).split(counts))
