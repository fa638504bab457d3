"""InternVL: an image is cut into tiles, and the whole image added if there are several."""

from __future__ import annotations

from typing import Any, ClassVar

from PIL import Image

from quire.server.media.pixels import PixelReader, chosen_bool, chosen_detail, chosen_int, one_side, tiles
from quire.server.media.processor import ProcessedImage

_MOST_TILES = 64  # that a client may ask for


class InternVLProcessor:
    """Prepares images for InternVL. With `detail` low, only the whole image is shown."""

    placeholder: ClassVar[str] = "<IMG_CONTEXT>"
    image_token = "<IMG_CONTEXT>"
    options: ClassVar[frozenset[str]] = frozenset({"crop_to_patches", "min_patches", "max_patches", "detail"})
    defaults: ClassVar[tuple[int, int]] = (448, 14)  # sides of a tile and of a patch
    crops: bool = True

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.side = one_side("vision_config.image_size", vision.get("image_size", self.defaults[0]))
        found = one_side("preprocessor_config.json: size", preprocessor.get("size") or self.side)
        if found != self.side:
            raise ValueError(f"preprocessor_config.json: size {found} must be the encoder's image_size, {self.side}")
        patch = one_side("vision_config.patch_size", vision.get("patch_size", self.defaults[1]))
        self.tokens = self._side_of_tile(config, self.side // patch) ** 2
        self.fewest, self.most = preprocessor.get("min_patches", 1), preprocessor.get("max_patches", 12)
        self.reader = PixelReader(preprocessor)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        grids = [self._grid(width, height, *self._tiles(options)) for width, height in sizes]
        return [self.tokens * (columns * rows + (columns * rows > 1)) for columns, rows in grids]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, *self._tiles(options)) for image in images]

    def _tiles(self, options: dict[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles of an image."""
        most = chosen_int(options, "max_patches", self.most, _MOST_TILES)
        fewest = chosen_int(options, "min_patches", min(self.fewest, most), most)
        crops = self.crops and chosen_detail(options) != "low"
        return (fewest, most) if chosen_bool(options, "crop_to_patches", crops) and most > 1 else (1, 1)

    def _side_of_tile(self, config: dict[str, Any], patches: int) -> int:
        """Return the tokens of a side of a tile."""
        return int(patches * config.get("downsample_ratio", 0.5))

    def _grid(self, width: int, height: int, fewest: int, most: int) -> tuple[int, int]:
        """Return columns and rows of the tiles of an image."""
        return best_grid(width, height, self.side, fewest, most)

    def _text(self, tiles: int) -> tuple[str, list[int]]:
        """Return the text of an image of so many tiles, the whole image included, and the counts of its tokens."""
        return f"<img>{self.image_token}</img>", [self.tokens * tiles]

    def _process(self, image: Image.Image, fewest: int, most: int) -> ProcessedImage:
        columns, rows = self._grid(image.width, image.height, fewest, most)
        parts = tiles(self.reader.resize(image, rows * self.side, columns * self.side), self.side)
        if len(parts) > 1:
            parts.append(self.reader.resize(image, self.side, self.side))
        return ProcessedImage({"pixel_values": self.reader.numbers(parts)}, *self._text(len(parts)))


def best_grid(
    width: int, height: int, side: int, fewest: int, most: int, longest: int | None = None
) -> tuple[int, int]:
    """Return columns and rows, at most `longest` each and `fewest` to `most` tiles in all, whose shape is the closest
    to the image's.

    Among equally close ones it is the first, or the last one after it that has less than twice the pixels of the image.
    """
    best, difference = (1, 1), float("inf")
    side_limit = range(1, min(most, longest or most) + 1)
    grids = [(c, r) for c in side_limit for r in side_limit if fewest <= c * r <= most]
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        found = abs(width / height - columns / rows)
        if found < difference or (found == difference and width * height > 0.5 * side * side * columns * rows):
            best, difference = (columns, rows), found
    return best
