"""Qwen2-VL to Qwen3.5, PaddleOCR-VL, LFM3-VL and GLM's: images keep their shape; a number of pixels limits them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.pixels import MAX_PIXELS, PixelReader, chosen_detail, chosen_int
from quire.server.media.processor import ProcessedImage

MAX_RATIO = 200  # between the sides of an image
_LOW_DETAIL = 512 * 512  # pixels
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of the limits in `size`


class QwenVLProcessor:
    """A token for each square of `merge` x `merge` patches."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    image_token = "<|image_pad|>"
    options: ClassVar[frozenset[str]] = frozenset({"min_pixels", "max_pixels", "size", "detail"})
    defaults: ClassVar[dict[str, int]] = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.reader = PixelReader(preprocessor)
        self.patch = preprocessor.get("patch_size") or vision.get("patch_size", 14)
        self.merge = preprocessor.get("merge_size") or vision.get("spatial_merge_size", 2)
        size = preprocessor.get("size") or {}
        self.limits = {
            name: preprocessor.get(name) or size.get(edge) or size.get(name) or self.defaults[name]
            for name, edge in _EDGES.items()
        }

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        limits, unit = self._limits(options), self.patch * self.merge
        found = [self.size(height, width, unit, *limits) for width, height in sizes]
        return [height * width // unit**2 for height, width in found]

    def size(self, height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
        """Return the sides of the resized image; see `smart_size`."""
        return smart_size(height, width, unit, least, most)

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        limits = self._limits(options)
        return [self._process(image, *limits) for image in images]

    def _limits(self, options: dict[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most pixels of an image."""
        size = options.get("size", {})
        if not isinstance(size, dict) or not set(size) <= set(_EDGES.values()):
            raise ValueError(
                f"mm_processor_kwargs.size must have shortest_edge and longest_edge in pixels, not {size!r}"
            )
        given = {name: size[edge] for name, edge in _EDGES.items() if edge in size} | options
        least, most = (chosen_int(given, name, self.limits[name], MAX_PIXELS) for name in _EDGES)
        if chosen_detail(options) == "low":
            most = min(most, _LOW_DETAIL)
            least = min(least, most)
        if least > most:
            raise ValueError(f"mm_processor_kwargs: min_pixels {least} is more than max_pixels {most}")
        return least, most

    def _process(self, image: Image.Image, least: int, most: int) -> ProcessedImage:
        height, width = self.size(image.height, image.width, self.patch * self.merge, least, most)
        pixels = self.reader.numbers([self.reader.resize(image, height, width)])
        grid = 1, height // self.patch, width // self.patch
        features = {"pixel_values": self._patches(pixels), "grid": np.asarray(grid)}
        frames, rows, columns = grid[0], grid[1] // self.merge, grid[2] // self.merge
        return ProcessedImage(features, self.image_token, [frames * rows * columns], (frames, rows, columns))

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        return patches(pixels, self.patch, self.merge)


class PaddleOCRVLProcessor(QwenVLProcessor):
    """PaddleOCR-VL: like Qwen2-VL, but an image thinner than a token is first enlarged."""

    placeholder: ClassVar[str] = "<|IMAGE_PLACEHOLDER|>"
    image_token = "<|IMAGE_PLACEHOLDER|>"
    defaults: ClassVar[dict[str, int]] = {"min_pixels": 384 * 384, "max_pixels": 1536 * 1536}

    def size(self, height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
        if height < unit:
            height, width = unit, round(width * unit / height)
        if width < unit:
            height, width = round(height * unit / width), unit
        return smart_size(height, width, unit, least, most)


class Lfm3VLProcessor(QwenVLProcessor):
    """LFM3-VL: like Qwen2-VL, with the image token of its tokenizer."""

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        super().__init__({"vision_config": {"patch_size": 16} | config["vision_config"]}, preprocessor)
        self.placeholder = self.image_token = preprocessor.get("image_token") or self.image_token


class GlmVProcessor(QwenVLProcessor):
    """GLM-4.1V to 4.6V and GLM-OCR: like Qwen2-VL, but the limits are those of the two frames that a picture stands
    for, and an image thinner than a token is first enlarged.
    """

    placeholder: ClassVar[str] = "<|image|>"
    image_token = "<|image|>"
    defaults: ClassVar[dict[str, int]] = {"min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15000}

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        super().__init__(config, preprocessor)
        self.frames = preprocessor.get("temporal_patch_size", 2)

    def size(self, height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return smart_size(height, width, unit, least / self.frames, most / self.frames)


def patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches of frames `[F, 3, height, width]`, token by token: `[T, 3, F, patch ** 2]`."""
    rows, columns = pixels.shape[2] // (patch * merge), pixels.shape[3] // (patch * merge)
    squares = pixels.reshape(len(pixels), 3, rows, merge, patch, columns, merge, patch)
    squares = squares.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return np.ascontiguousarray(squares).reshape(-1, 3, len(pixels), patch * patch)


def smart_size(height: int, width: int, unit: int, least: float, most: float) -> tuple[int, int]:
    """Return multiples of `unit` near the sides of an image, with a product from `least` to `most` as far as they allow
    that.

    Raises ValueError for an image that is too long for its width, or the other way round.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_RATIO:
        raise ValueError(f"one side is {ratio:.0f} times as long as the other, and the limit is {MAX_RATIO}")
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / factor / unit)) for side in (height, width))
    elif rows * columns * unit**2 < least:
        factor = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * factor / unit) for side in (height, width))
    return rows * unit, columns * unit
