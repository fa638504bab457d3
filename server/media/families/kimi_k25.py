"""Kimi K2.5: images keep their shape and size, unless they have too many patches, and are padded to whole tokens."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.qwen_vl import patches
from quire.server.media.pixels import HALF, PixelReader, chosen_detail, chosen_int, one_side
from quire.server.media.processor import ProcessedImage

_LOW = 512  # pixels of the sides of a square with as many patches, for `detail` low
_MOST_PATCHES = 1 << 16  # that a client may ask for
# names of the settings in Kimi's own files -> transformers'
_ALIASES = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}


class KimiK25Processor:
    """A token for each square of `merge` x `merge` patches."""

    placeholder: ClassVar[str] = "<|media_pad|>"
    image_token = "<|media_pad|>"
    options: ClassVar[frozenset[str]] = frozenset({"max_patches", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        own = preprocessor.get("media_proc_cfg") or {}
        if own.get("fixed_output_tokens") is not None:
            raise ValueError("preprocessor_config.json: fixed_output_tokens is not supported")
        given = preprocessor | {_ALIASES.get(name, name): value for name, value in own.items()}
        vision, size = config["vision_config"], given.get("size") or {}
        self.patch = given.get("patch_size") or vision.get("patch_size", 14)
        merge = given.get("merge_size") or vision.get("merge_kernel_size") or 2
        self.merge = one_side("preprocessor_config.json: merge_size", merge)
        self.most = given.get("max_patches", 16384)
        self.side = given.get("patch_limit_on_one_side") or size.get("max_height", 512)
        self.reader = PixelReader(given, HALF, HALF)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        found = [self._tokens(*self._fitted(height, width, options)) for width, height in sizes]
        return [rows * columns for rows, columns in found]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, options) for image in images]

    def _fitted(self, height: int, width: int, options: dict[str, Any]) -> tuple[int, int]:
        """Return the sides of the image without padding."""
        low = (_LOW // self.patch) ** 2 if chosen_detail(options) == "low" else self.most
        most = chosen_int(options, "max_patches", min(self.most, low), _MOST_PATCHES)
        whole = max(1, height // self.patch) * max(1, width // self.patch)
        limit = self.side * self.patch
        scale = min(1.0, math.sqrt(most / whole), limit / height, limit / width)
        return min(max(1, int(height * scale)), limit), min(max(1, int(width * scale)), limit)

    def _tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the tokens that cover an image."""
        unit = self.patch * self.merge
        return -(-height // unit), -(-width // unit)

    def _process(self, image: Image.Image, options: dict[str, Any]) -> ProcessedImage:
        height, width = self._fitted(image.height, image.width, options)
        (rows, columns), unit = self._tokens(height, width), self.patch * self.merge
        canvas = Image.new("RGB", (columns * unit, rows * unit))
        canvas.paste(self.reader.resize(image, height, width))
        pixels = patches(self.reader.numbers([canvas]), self.patch, self.merge)
        grid = np.array([1, rows * self.merge, columns * self.merge])
        return ProcessedImage({"pixel_values": pixels, "grid": grid}, self.image_token, [rows * columns])
