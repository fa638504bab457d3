"""Inkling 1 and 2: images keep their size and are divided into squares, each of which is a token; what is beyond the
image is below black.
"""

from __future__ import annotations

from math import floor
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.pixels import CLIP_MEAN, CLIP_STD, HALF, PixelReader, one_side
from quire.server.media.processor import ProcessedImage

_BEYOND = -1.0  # the value of pixels there, of 255


class InklingProcessor:
    """The squares of a row end with one that has the rest of it, perhaps nothing."""

    placeholder: ClassVar[str] = "<|unused_200054|>"
    image_token = "<|unused_200054|>"
    options: ClassVar[frozenset[str]] = frozenset()
    mean, std = CLIP_MEAN, CLIP_STD

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        side = preprocessor.get("size") or config["vision_config"].get("patch_size", 40)
        self.side = one_side("preprocessor_config.json: size", side)
        self.reader = PixelReader(preprocessor, self.mean, self.std, Image.Resampling.LANCZOS)
        self.factor = preprocessor.get("rescale_image_frac")
        self.most = preprocessor.get("rescale_image_max_upscaled_long_edge", 2048)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        return [rows * columns for rows, columns in (self._grid(*self._scaled(*size)) for size in sizes)]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image) for image in images]

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        longest = max(width, height)
        if self.factor is None:
            return width, height
        wanted = longest * self.factor
        if self.most is not None:
            wanted = min(wanted, max(self.most, longest))
        ratio = wanted / longest
        return floor(width * ratio + 0.5), floor(height * ratio + 0.5)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        return -(-height // self.side), width // self.side + 1

    def _process(self, image: Image.Image) -> ProcessedImage:
        width, height = self._scaled(*image.size)
        if (width, height) != image.size:
            image = self.reader.resize(image, height, width)
        (rows, columns), side = self._grid(width, height), self.side
        canvas = np.full((rows * side, columns * side, 3), _BEYOND, np.float32)
        canvas[:height, :width] = np.asarray(image)
        squares = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        pixels = np.ascontiguousarray(squares * self.reader.scale - self.reader.offset, np.float32)
        features = {"pixel_values": pixels, "grid": np.array([rows, columns])}
        return ProcessedImage(features, self.image_token, [rows * columns])


class Inkling2Processor(InklingProcessor):
    """No square is beyond the image."""

    mean, std = HALF, HALF

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        patch = vision.get("patch_size", vision.get("native_patch_size", 20))
        merge = vision.get("spatial_merge_size", vision.get("adapter_merge_size", 2))
        side = {"height": patch * merge, "width": patch * merge}
        super().__init__(config, {"size": side} | preprocessor | {"rescale_image_frac": None})

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        return -(-height // self.side), -(-width // self.side)
