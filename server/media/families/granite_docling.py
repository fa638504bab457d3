"""Granite Docling: a page is cut into tiles, whose rows and columns the text names, and shown whole after them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.internvl import best_grid
from quire.server.media.pixels import PixelReader, chosen_bool, chosen_detail, chosen_int, one_side, tiles
from quire.server.media.processor import ProcessedImage

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LONGEST, _MOST_TILES = 16, 64  # tiles in a row: the tokenizer names no more; tiles that a client may ask for
_DENSE = ("dense_max_patches", "dense_max_scale", "dense_min_aspect", "dense_max_aspect")


class GraniteDoclingProcessor:
    """With `detail` low, only the whole page is shown. `fine_route` makes four times as many tokens of a tile."""

    placeholder: ClassVar[str] = "<image>"
    image_token = "<image>"
    options: ClassVar[frozenset[str]] = frozenset(
        {"crop_to_patches", "min_patches", "max_patches", "fine_route", "detail"}
    )

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.side = vision.get("image_size", 512)
        found = one_side("preprocessor_config.json: size", preprocessor.get("size") or self.side)
        if found != self.side:
            raise ValueError(f"preprocessor_config.json: size {found} must be the encoder's image_size, {self.side}")
        self.tokens = (self.side // vision.get("patch_size", 16) // vision.get("scale_factor", 4)) ** 2
        self.has_fine = vision.get("use_fine_route", True)
        self.fine, self.crops = preprocessor.get("fine_route", False), preprocessor.get("crop_to_patches", True)
        self.fewest, self.most = preprocessor.get("min_patches", 1), preprocessor.get("max_patches", 32)
        self.dense = [preprocessor.get(name, 0) for name in _DENSE]
        self.reader = PixelReader(preprocessor)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        grids = [self._grid(width, height, options) for width, height in sizes]
        tokens = self._tokens_of_tile(options)
        return [tokens * (columns * rows + (columns * rows > 1)) for columns, rows in grids]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, options) for image in images]

    def _tokens_of_tile(self, options: dict[str, Any]) -> int:
        fine = chosen_bool(options, "fine_route", self.fine)
        if fine and not self.has_fine:
            raise ValueError("mm_processor_kwargs.fine_route: the model has no fine path (use_fine_route)")
        return self.tokens * (4 if fine else 1)

    def _grid(self, width: int, height: int, options: dict[str, Any]) -> tuple[int, int]:
        """Return columns and rows of the tiles of a page."""
        most = chosen_int(options, "max_patches", self.most, _MOST_TILES)
        fewest = chosen_int(options, "min_patches", min(self.fewest, most), most)
        if not chosen_bool(options, "crop_to_patches", self.crops and chosen_detail(options) != "low") or most == 1:
            return 1, 1
        if self._is_dense(width, height, fewest, most):
            most = self.dense[0]
        return best_grid(width, height, self.side, fewest, most, _LONGEST)

    def _is_dense(self, width: int, height: int, fewest: int, most: int) -> bool:
        """Return whether a page is so wide or large that it gets `dense_max_patches` tiles."""
        tiles_of_dense, scale, least, largest = self.dense
        if not tiles_of_dense or (scale <= 0 and least <= 0):
            return False
        ratio = width / height
        if (least > 0 and ratio <= least) or 0 < largest < ratio:
            return False
        columns = best_grid(width, height, self.side, fewest, most, _LONGEST)[0]
        return scale <= 0 or columns * self.side / width < scale

    def _process(self, image: Image.Image, options: dict[str, Any]) -> ProcessedImage:
        columns, rows = self._grid(image.width, image.height, options)
        parts = tiles(self.reader.resize(image, rows * self.side, columns * self.side), self.side)
        if len(parts) > 1:
            parts.append(self.reader.resize(image, self.side, self.side))
        tokens = self._tokens_of_tile(options)
        features = {"pixel_values": self.reader.numbers(parts)}
        if tokens > self.tokens:
            features["fine"] = np.ones(1, np.int64)
        return ProcessedImage(features, self._text(rows, columns), [tokens] * len(parts))

    def _text(self, rows: int, columns: int) -> str:
        lines = (
            "".join(f"{_AROUND}<row_{row}_col_{column}>{self.image_token}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        whole = f"\n{_AROUND}{_WHOLE}{self.image_token}{_AROUND}" if rows * columns > 1 else ""
        return "".join(lines) + whole
