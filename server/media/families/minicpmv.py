"""MiniCPM-V 4.6: the whole image, and slices of a large one in a grid of about its shape."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.inputs import ORDINAL
from quire.server.media.pixels import HALF, PixelReader, chosen_detail, chosen_int
from quire.server.media.processor import ProcessedImage

_MOST_SLICES = 64  # that a client may ask for


class MiniCPMVProcessor:
    """A token for 4 x 4 patches, or 2 x 2. With `detail` low, only the whole image is shown."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    image_token = "<|image_pad|>"
    options: ClassVar[frozenset[str]] = frozenset({"max_slice_nums", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        self.placeholder = self.image_token = preprocessor.get("image_token") or self.image_token
        mode = preprocessor.get("downsample_mode", "16x")
        if mode != config.get("downsample_mode", "16x"):
            raise ValueError(f"preprocessor_config.json: downsample_mode {mode} must be that of config.json")
        self.merge = 2 if mode == "4x" else 4
        self.patch, self.side = preprocessor.get("patch_size", 14), preprocessor.get("scale_resolution", 448)
        self.slices = preprocessor.get("max_slice_nums", 9) if preprocessor.get("slice_mode", True) else 1
        self.numbered = preprocessor.get("use_image_id", True)
        self.reader = PixelReader(preprocessor, HALF, HALF)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        found = [self._layout(height, width, options) for width, height in sizes]
        return [self._tokens(*whole) + rows * columns * self._tokens(*part) for whole, part, (rows, columns) in found]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, options) for image in images]

    def _tokens(self, height: int, width: int) -> int:
        return height * width // (self.patch * self.merge) ** 2

    def _layout(
        self, height: int, width: int, options: dict[str, Any]
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Return the sides of the whole image, those of a slice, and rows and columns of slices."""
        most = 1 if chosen_detail(options) == "low" else self.slices
        rows, columns = grid = self._grid(height, width, chosen_int(options, "max_slice_nums", most, _MOST_SLICES))
        if not rows:
            return self._scaled(height, width), (0, 0), grid
        whole = self._scaled(height, width) if height * width > self.side**2 else self._whole(height, width)
        return whole, self._scaled(_multiple(height, rows) / rows, _multiple(width, columns) / columns), grid

    def _grid(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return rows and columns of slices, (0, 0) for none: of about the image's pixels, the closest to its shape."""
        about = min(math.ceil(width * height / self.side**2), most)
        if about <= 1:
            return 0, 0
        best, difference = (1, 1), math.inf
        for count in (about - 1, about, about + 1):
            if count == 1 or count > most:
                continue
            for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
                columns = count // rows
                found = abs(math.log(width / height) - math.log(columns / rows))
                if found < difference or (found == difference and rows > best[0]):
                    best, difference = (rows, columns), found
        return best

    def _scaled(self, height: float, width: float) -> tuple[int, int]:
        """Return sides of whole tokens with about the pixels of a square of `side`."""
        ratio = width / height
        high = int(self.side / math.sqrt(ratio))
        return self._whole(high, int(high * ratio))

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        return _multiple(height, unit), _multiple(width, unit)

    def _process(self, image: Image.Image, options: dict[str, Any]) -> ProcessedImage:
        (height, width), (high, wide), (rows, columns) = self._layout(image.height, image.width, options)
        parts = [self.reader.resize(image, height, width)]
        if rows:
            canvas = self.reader.resize(image, rows * high, columns * wide)
            boxes = [(wide * c, high * r, wide * (c + 1), high * (r + 1)) for r in range(rows) for c in range(columns)]
            parts += [canvas.crop(box) for box in boxes]
        grids = np.array([(part.height // self.patch, part.width // self.patch) for part in parts])
        pixels = np.concatenate([self._patches(part) for part in parts])
        counts = [self._tokens(part.height, part.width) for part in parts]
        return ProcessedImage({"pixel_values": pixels, "grids": grids}, self._text(rows, columns), counts)

    def _patches(self, part: Image.Image) -> np.ndarray:
        """Return the patches row by row, `[T, 3, patch, patch]`."""
        pixels, patch = self.reader.numbers([part])[0], self.patch
        rows, columns = part.height // patch, part.width // patch
        squares = pixels.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(squares).reshape(-1, 3, patch, patch)

    def _text(self, rows: int, columns: int) -> str:
        number = f"<image_id>{ORDINAL}</image_id>" if self.numbered else ""
        line = f"<slice>{self.image_token}</slice>" * columns
        return f"{number}<image>{self.image_token}</image>" + "\n".join([line] * rows)


def _multiple(length: int, unit: int) -> int:
    """Return the multiple of `unit` that is next to `length`, not 0."""
    return max(round(length / unit) * unit, unit)
