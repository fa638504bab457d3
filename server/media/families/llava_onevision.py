"""Llava-OneVision: a single image is shown whole and in tiles of a higher resolution; several images only whole."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.pixels import PixelReader, chosen_detail, one_side, padded, padded_to_square, tiles
from quire.server.media.processor import ProcessedImage

_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


class LlavaOnevisionProcessor:
    """Prepares images for LLaVA-OneVision. With `detail` low, a single image is shown as one of several."""

    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset({"detail"})
    sized_by_number: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.side, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
        found = one_side("preprocessor_config.json: size", preprocessor.get("size") or self.side)
        if found != self.side:
            raise ValueError(f"preprocessor_config.json: size {found} must be the encoder's image_size, {self.side}")
        self.patches = self.side // patch
        pinpoints = config.get("image_grid_pinpoints") or _PINPOINTS
        self.resolutions = [(height, width) for height, width in pinpoints]
        self.most = most_tiles(config.get("vision_aspect_ratio", "anyres_max_9"))
        self.reader = PixelReader(preprocessor)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        if len(sizes) > 1 or chosen_detail(options) == "low":
            return [self.patches**2 + 1] * len(sizes)
        return [self._count(self._layout_of(height, width)) for width, height in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        if len(images) == 1 and chosen_detail(options) != "low":
            return [self._in_tiles(images[0])]
        return [self._whole(image) for image in images]

    def _whole(self, image: Image.Image) -> ProcessedImage:
        image = self.reader.resize(padded_to_square(image, self.reader.mean), self.side, self.side)
        features = {"pixel_values": self.reader.numbers([image])}
        return ProcessedImage(features, self.image_token, [self.patches**2 + 1])

    def _in_tiles(self, image: Image.Image) -> ProcessedImage:
        height, width = best_resolution(image.height, image.width, self.resolutions)
        size = fitted(image.height, image.width, height, width)
        parts = tiles(padded(self.reader.resize(image, *size), height, width), self.side)
        pixels = self.reader.numbers([self.reader.resize(image, self.side, self.side), *parts])
        layout = self._layout_of(image.height, image.width)
        features = {"pixel_values": pixels, "layout": np.array(layout, np.int64)}
        return ProcessedImage(features, self.image_token, [self._count(layout)])

    def _layout_of(self, height: int, width: int) -> tuple[int, int, int, int, int, int]:
        full_height, full_width = best_resolution(height, width, self.resolutions)
        return self.layout(height, width, full_height // self.side, full_width // self.side)

    def _count(self, layout: tuple[int, int, int, int, int, int]) -> int:
        return self.patches**2 + layout[4] * (layout[5] + 1)

    def layout(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int, int, int, int, int]:
        """Return how the encoder joins the tiles of an image of `height` x `width` pixels: rows and columns of tiles,
        rows and columns of patches that are padding on each side, rows and columns of embeddings.
        """
        full_height, full_width = rows * self.patches, columns * self.patches
        top = left = 0
        if width / height > full_width / full_height:
            top = (full_height - int(round(height * (full_width / width), 7))) // 2
        else:
            left = (full_width - int(round(width * (full_height / height), 7))) // 2
        used_height, used_width = full_height - 2 * top, full_width - 2 * left
        ratio = math.sqrt(used_height * used_width / (self.most * self.patches**2))
        if ratio > 1.1:
            used_height, used_width = max(1, int(used_height // ratio)), max(1, int(used_width // ratio))
        return rows, columns, top, left, used_height, used_width


def most_tiles(aspect_ratio: str) -> int:
    """Return N of "anyres_max_N": the embeddings of an image's tiles are reduced to about those of N tiles."""
    match = re.fullmatch(r"anyres_max_(\d+)", aspect_ratio)
    if not match:
        raise ValueError(f"vision_aspect_ratio {aspect_ratio!r} is not supported: only anyres_max_N is")
    return int(match[1])


def best_resolution(height: int, width: int, resolutions: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the resolution that keeps most pixels of the image; among equals, the one with the least padding."""

    def worth(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=worth)


def fitted(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """Return the size of an image that is scaled to fit into another size."""
    if most_width / width < most_height / height:
        return min(math.ceil(height * (most_width / width)), most_height), most_width
    return most_height, min(math.ceil(width * (most_height / height)), most_width)
