"""DeepSeek-OCR, Unlimited-OCR and DeepSeek-OCR-2: a view of the whole page, and tiles of a larger version of it.

Features are bytes, scaled by the encoder: they take a quarter of the memory of float32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.internvl import best_grid
from quire.server.media.pixels import chosen_bool, chosen_int, one_side, tiles
from quire.server.media.processor import ProcessedImage

_GRAY = (127, 127, 127)
_PATCH = 16  # pixels; the encoder makes one embedding of 4 x 4 patches
_MAX_SIDE = 1280
_MAX_TILES = 32
Mode = tuple[int, int, bool]  # sides of the view and of the tiles, and whether there are tiles


class DeepseekOCRProcessor:
    """Options: `mode` is tiny, small, base, large or gundam (the default), or in detail `base_size`, `image_size`,
    `crop_mode` and `max_crops`: the sides of the view and of the tiles, whether there are tiles, and how many at most.
    """

    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset({"mode", "base_size", "image_size", "crop_mode", "max_crops"})
    modes: ClassVar[dict[str, Mode]] = {
        "tiny": (512, 512, False),
        "small": (640, 640, False),
        "base": (1024, 1024, False),
        "large": (1280, 1280, False),
        "gundam": (1024, 640, True),
    }
    most: ClassVar[int] = 6  # tiles by default
    cuts_several: ClassVar[bool] = True  # tiles by default even with several images in the prompt
    squeezed_side: ClassVar[int] = 640  # up to this side, a view without tiles does not keep the image's shape

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        for key in ("image_mean", "image_std"):
            if set(preprocessor.get(key) or [0.5]) != {0.5}:
                raise ValueError(f"preprocessor: {key} {preprocessor[key]} is not supported: only 0.5 is")
        base, tile, self.cuts = self.modes["gundam"]
        self.base = one_side("preprocessor: size", preprocessor.get("base_size") or preprocessor.get("size") or base)
        self.tile = preprocessor.get("image_size") or preprocessor.get("tile_size") or tile
        self.cuts = preprocessor.get("crop_mode", preprocessor.get("crop_to_patches", self.cuts))
        self.most_tiles = preprocessor.get("max_patches", self.most)
        for name, side in (("base_size", self.base), ("image_size", self.tile)):
            self.check_side(f"preprocessor: {name}", side)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        base, tile, most = self._view(options, len(sizes))
        whole = self.num_embeds(base, 1, 1) + 1
        grids = [self._grid(width, height, tile, most) for width, height in sizes]
        return [whole + (self.num_embeds(tile, *grid) if grid else 0) for grid in grids]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        view = self._view(options, len(images))
        return [self._process(image, *view) for image in images]

    def _view(self, options: dict[str, Any], num_images: int) -> tuple[int, int, int]:
        """Return (side of the view, side of the tiles, maximum number of tiles)."""
        base, tile, cuts = self._mode(options, num_images)
        most = chosen_int(options, "max_crops", self.most_tiles, _MAX_TILES)
        return base, tile, most if cuts else 1

    def _grid(self, width: int, height: int, tile: int, most: int) -> tuple[int, int] | None:
        """Return columns and rows of the tiles of an image; None if it has none."""
        return best_grid(width, height, tile, 2, most) if most > 1 and max(width, height) > tile else None

    def _mode(self, options: dict[str, Any], num_images: int) -> Mode:
        name = options.get("mode")
        if name is None:
            base, tile, cuts = self.base, self.tile, self.cuts and (self.cuts_several or num_images == 1)
        elif isinstance(name, str) and name in self.modes:
            base, tile, cuts = self.modes[name]
        else:
            raise ValueError(f"mm_processor_kwargs.mode must be one of {', '.join(self.modes)}, not {name!r}")
        cuts = chosen_bool(options, "crop_mode", cuts)
        tile = chosen_int(options, "image_size", tile, _MAX_SIDE)
        base = chosen_int(options, "base_size", tile if not cuts and "image_size" in options else base, _MAX_SIDE)
        if not cuts and "image_size" in options and tile != base:
            raise ValueError(
                f"mm_processor_kwargs.image_size {tile} must be base_size, {base}, because crop_mode is false"
            )
        self.check_side("mm_processor_kwargs.base_size", base)
        self.check_side("mm_processor_kwargs.image_size", tile)
        return base, tile, cuts

    def check_side(self, name: str, side: int) -> None:
        """Raise ValueError if the encoder has no embeddings for squares of this side."""
        if not isinstance(side, int) or side % _PATCH or not 0 < side <= _MAX_SIDE:
            raise ValueError(f"{name} must be a multiple of {_PATCH} up to {_MAX_SIDE}, not {side}")

    def _process(self, image: Image.Image, base: int, tile: int, most: int) -> ProcessedImage:
        if grid := self._grid(*image.size, tile, most):
            columns, rows = grid
            parts = tiles(image.resize((columns * tile, rows * tile), Image.Resampling.BICUBIC), tile)
            features = {"pixel_values_local": _stacked(parts), "grid": np.array([columns, rows], dtype=np.int64)}
            count = self.num_embeds(tile, columns, rows)
        else:
            features, count = {}, 0
        squeezed = most == 1 and base <= self.squeezed_side
        view = image.resize((base, base), Image.Resampling.BICUBIC) if squeezed else self.view(image, base)
        features["pixel_values"] = _stacked([view])
        return ProcessedImage(features, self.image_token, [count + self.num_embeds(base, 1, 1) + 1])

    def num_embeds(self, side: int, columns: int, rows: int) -> int:
        """Return the number of embeddings of a grid of squares: each of its rows ends with one more."""
        num = -(-side // _PATCH // 4)
        return rows * num * (columns * num + 1)

    def view(self, image: Image.Image, side: int) -> Image.Image:
        """Return the image in the middle of a gray square."""
        sizes = [max(1, self.scaled(length, max(image.size), side)) for length in image.size]
        canvas = Image.new("RGB", (side, side), _GRAY)
        resized = image.resize((sizes[0], sizes[1]), Image.Resampling.BICUBIC)
        canvas.paste(resized, (self.half(side - sizes[0]), self.half(side - sizes[1])))
        return canvas

    # rounding of the published code, which uses Pillow's ImageOps.pad

    def scaled(self, length: int, longest: int, side: int) -> int:
        """Return a side of an image whose longest side becomes `side`."""
        return round(length / longest * side)

    def half(self, room: int) -> int:
        """Return the part of the room around an image that is left of it or above it."""
        return round(room * 0.5)


class UnlimitedOCRProcessor(DeepseekOCRProcessor):
    most = 32
    cuts_several = False
    sized_by_number: ClassVar[bool] = True


class DeepseekOCR2Processor(DeepseekOCRProcessor):
    """Modes: small and base have a view of 768 or 1024 pixels, gundam (the default) also has tiles of 768."""

    modes: ClassVar[dict[str, Mode]] = {
        "small": (768, 768, False),
        "base": (1024, 1024, False),
        "gundam": (1024, 768, True),
    }
    squeezed_side = 0

    def check_side(self, name: str, side: int) -> None:
        if side not in (768, 1024):
            raise ValueError(f"{name} must be 768 or 1024, not {side}")

    def num_embeds(self, side: int, columns: int, rows: int) -> int:
        return columns * rows * (side // _PATCH // 4) ** 2

    def scaled(self, length: int, longest: int, side: int) -> int:
        return round(length * (side / longest))

    def half(self, room: int) -> int:
        return room // 2


def _stacked(squares: list[Image.Image]) -> np.ndarray:
    """Return `[len(squares), side, side, 3]`, bytes."""
    return np.stack([np.asarray(square) for square in squares])
