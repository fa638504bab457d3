"""Granite 4 Vision: the whole image, and its tiles without their padding, row by row, in fewer tokens than patches."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

from PIL import Image

from quire.server.media.llava_onevision import LlavaOnevisionProcessor
from quire.server.media.processor import ProcessedImage


class Granite4VisionProcessor(LlavaOnevisionProcessor):
    """Every image is cut as Llava-OneVision's single one is, and all tokens of the tiles are used."""

    options: ClassVar[frozenset[str]] = frozenset()
    sized_by_number = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        pinpoints = config.get("image_grid_pinpoints") or preprocessor.get("image_grid_pinpoints")
        super().__init__(config | {"image_grid_pinpoints": pinpoints}, preprocessor)
        rate = config.get("downsample_rate")
        if not rate:
            raise ValueError("config.json: downsample_rate is missing")
        self.patches = int(self.patches * Fraction(rate))
        self.most = float("inf")  # tiles are not reduced

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        return [self._count(self._layout_of(height, width)) for width, height in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._in_tiles(image) for image in images]
