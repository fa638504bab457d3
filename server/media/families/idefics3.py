"""Idefics 3 and SmolVLM: an image is cut into tiles, whose rows and columns the text names, before the whole image."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from PIL import Image

from quire.server.media.pixels import HALF, PixelReader, chosen_bool, chosen_detail, chosen_edge, tiles
from quire.server.media.processor import ProcessedImage

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LONGEST = 4096  # pixels to which images are resized at most


class Idefics3Processor:
    """Prepares images for Idefics 3. With `detail` low, only the whole image is shown."""

    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset({"size", "max_image_size", "do_image_splitting", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.side, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
        self._check_tile((preprocessor.get("max_image_size") or {}).get("longest_edge", self.side))
        self.tokens = (self.side // patch // config.get("scale_factor", 2)) ** 2
        size = preprocessor.get("size") or {}
        if not size.get("longest_edge", True):
            raise ValueError(f"preprocessor_config.json: size {size} is not supported: use longest_edge")
        self.longest = min(size.get("longest_edge", 4 * 364), _LONGEST)
        self.splits = preprocessor.get("do_image_splitting", True)
        self.reader = PixelReader(preprocessor, HALF, HALF, Image.Resampling.LANCZOS)

    def _check_tile(self, side: int) -> None:
        if side != self.side:
            raise ValueError(f"max_image_size.longest_edge {side} must be the encoder's image_size, {self.side}")

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        longest, splits = self._chosen(options)
        parts = [math.prod(cut(*scaled(height, width, longest), self.side)) if splits else 1 for width, height in sizes]
        return [self.tokens * (num + 1 if num > 1 else 1) for num in parts]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, *self._chosen(options)) for image in images]

    def _chosen(self, options: dict[str, Any]) -> tuple[int, bool]:
        """Return the longest side of an image, and whether it is split."""
        self._check_tile(chosen_edge(options, "max_image_size", self.side, _LONGEST))
        longest = chosen_edge(options, "size", self.longest, _LONGEST)
        return longest, chosen_bool(options, "do_image_splitting", self.splits and chosen_detail(options) != "low")

    def _process(self, image: Image.Image, longest: int, splits: bool) -> ProcessedImage:
        image = self.reader.resize(image, *scaled(image.height, image.width, longest))
        rows = columns = 1
        if splits:
            rows, columns = cut(image.height, image.width, self.side)
            image = self.reader.resize(image, rows * self.side, columns * self.side)
        parts = tiles(image, self.side) if rows * columns > 1 else []
        pixels = self.reader.numbers([*parts, self.reader.resize(image, self.side, self.side)])
        text = self._text(rows, columns) if parts else ""
        text += f"{_AROUND}{_WHOLE}{self.image_token}{_AROUND}"
        return ProcessedImage({"pixel_values": pixels}, text, [self.tokens] * (len(parts) + 1))

    def _text(self, rows: int, columns: int) -> str:
        """Return the text of the tiles, which an empty line ends."""
        lines = (
            "".join(f"{_AROUND}<row_{row}_col_{column}>{self.image_token}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return "\n".join(lines) + "\n\n"


def scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size of an image whose longer side becomes `longest` and whose other side becomes even."""
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return max(shorter + shorter % 2, 1), longest
    shorter = int(longest * ratio)
    return longest, max(shorter + shorter % 2, 1)


def cut(height: int, width: int, side: int) -> tuple[int, int]:
    """Return rows and columns of the tiles of an image."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return max(1, math.ceil(int(columns * side / ratio) / side)), columns
    rows = math.ceil(height / side)
    return rows, max(1, math.ceil(int(rows * side * ratio) / side))
