"""Llava-NeXT and Granite 4 Vision: the whole image, and its tiles without their padding, row by row."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

from PIL import Image

from quire.server.media.families.llava_onevision import LlavaOnevisionProcessor
from quire.server.media.processor import ProcessedImage

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNextProcessor(LlavaOnevisionProcessor):
    """Every image is cut as Llava-OneVision's single one is, and all tokens of the tiles are used."""

    options: ClassVar[frozenset[str]] = frozenset()
    sized_by_number = False
    patch: ClassVar[int] = 32

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = {"patch_size": self.patch} | config["vision_config"]
        pinpoints = config.get("image_grid_pinpoints") or preprocessor.get("image_grid_pinpoints") or _PINPOINTS
        super().__init__(config | {"vision_config": vision, "image_grid_pinpoints": pinpoints}, preprocessor)
        self.most = float("inf")  # tiles are not reduced

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        return [self._count(self._layout_of(height, width)) for width, height in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._in_tiles(image) for image in images]


class Granite4VisionProcessor(LlavaNextProcessor):
    """An image has fewer tokens than patches."""

    patch = 16

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        super().__init__(config, preprocessor)
        rate = config.get("downsample_rate")
        if not rate:
            raise ValueError("config.json: downsample_rate is missing")
        self.patches = int(self.patches * Fraction(rate))
