"""LFM2-VL: a small image keeps its shape; a large one is cut into tiles, and shown whole and small after them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.internvl import best_grid
from quire.server.media.families.qwen_vl import smart_size
from quire.server.media.pixels import HALF, PixelReader, chosen_bool, chosen_detail, chosen_int, tiles
from quire.server.media.processor import ProcessedImage

_DEFAULTS = {"min_image_tokens": 64, "max_image_tokens": 256, "min_tiles": 2, "max_tiles": 10}
_MOST = {"min_image_tokens": 4096, "max_image_tokens": 4096, "min_tiles": 64, "max_tiles": 64}


class Lfm2VLProcessor:
    """Prepares images for LFM2-VL. With `detail` low, an image is not cut."""

    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset({*_DEFAULTS, "do_image_splitting", "use_thumbnail", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        self.patch = preprocessor.get("encoder_patch_size") or config["vision_config"].get("patch_size", 16)
        self.merge = preprocessor.get("downsample_factor") or config.get("downsample_factor", 2)
        self.side = preprocessor.get("tile_size", 512)
        if self.side % (self.patch * self.merge):
            raise ValueError(f"tile_size {self.side} must be a multiple of {self.patch * self.merge}")
        self.defaults = {name: preprocessor.get(name, value) for name, value in _DEFAULTS.items()}
        self.splits, self.thumbnail = (preprocessor.get(n, True) for n in ("do_image_splitting", "use_thumbnail"))
        self.tolerance = preprocessor.get("max_pixels_tolerance", 2.0)
        self.marks = preprocessor.get("use_image_special_tokens", True)
        self.reader = PixelReader(preprocessor, HALF, HALF, Image.Resampling.BILINEAR)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        return [sum(map(self._tokens, self._parts(*size, options)[0])) for size in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, options) for image in images]

    def _tokens(self, size: tuple[int, int]) -> int:
        return size[0] * size[1] // (self.patch * self.merge) ** 2

    def _parts(self, width: int, height: int, options: dict[str, Any]) -> tuple[list[tuple[int, int]], int, int]:
        """Return (heights and widths of an image's parts, columns and rows of its tiles: 0 if it is not cut)."""
        chosen = {name: chosen_int(options, name, self.defaults[name], _MOST[name]) for name in _DEFAULTS}
        for kind in ("image_tokens", "tiles"):
            if chosen[f"min_{kind}"] > chosen[f"max_{kind}"]:
                raise ValueError(f"mm_processor_kwargs: min_{kind} is more than max_{kind} {chosen[f'max_{kind}']}")
        splits = chosen_bool(options, "do_image_splitting", self.splits and chosen_detail(options) != "low")
        thumbnail = chosen_bool(options, "use_thumbnail", self.thumbnail)
        unit = self.patch * self.merge
        least, most = (chosen[f"{end}_image_tokens"] * unit**2 for end in ("min", "max"))
        whole = smart_size(height, width, unit, least, most)
        pixels = max(self.patch, round(height / unit) * unit) * max(self.patch, round(width / unit) * unit)
        if not splits or chosen["max_tiles"] == 1 or pixels <= most * self.tolerance:
            return [whole], 0, 0
        columns, rows = best_grid(width, height, self.side, chosen["min_tiles"], chosen["max_tiles"])
        several = columns * rows > 1
        return [(self.side, self.side)] * (columns * rows) + [whole] * (thumbnail and several), columns, rows

    def _process(self, image: Image.Image, options: dict[str, Any]) -> ProcessedImage:
        sizes, columns, rows = self._parts(image.width, image.height, options)
        parts = []
        if columns:
            parts = tiles(self.reader.resize(image, rows * self.side, columns * self.side), self.side)
        parts += [self.reader.resize(image, *size) for size in sizes[len(parts) :]]
        features = {
            "pixel_values": np.concatenate([self._patches(self.reader.numbers([part])[0]) for part in parts]),
            "grids": np.asarray([(height // self.patch, width // self.patch) for height, width in sizes]),
        }
        return ProcessedImage(features, self._text(len(sizes), columns, rows), [*map(self._tokens, sizes)])

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the patches of an image `[3, height, width]`, row by row: `[T, patch * patch * 3]`."""
        patch, (_, height, width) = self.patch, pixels.shape
        squares = pixels.reshape(3, height // patch, patch, width // patch, patch).transpose(1, 3, 2, 4, 0)
        return np.ascontiguousarray(squares).reshape(-1, 3 * patch**2)

    def _text(self, num_parts: int, columns: int, rows: int) -> str:
        if not self.marks:
            return self.image_token * num_parts
        names = []
        if columns * rows > 1:
            names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
            names += ["<|img_thumbnail|>"] * (num_parts - len(names))
        names = names or [""]
        return f"<|image_start|>{''.join(f'{name}{self.image_token}' for name in names)}<|image_end|>"
