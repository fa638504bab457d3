"""Pixtral, Mistral 3, Mistral Large 4 and LightOnOCR: images keep their shape; in Mistral's, every row of tokens ends
with a break.
"""

from __future__ import annotations

from typing import Any, ClassVar

from PIL import Image

from quire.server.media.pixels import PixelReader, chosen_detail, chosen_edge, one_side
from quire.server.media.processor import ProcessedImage

_LOW = 512  # pixels of the longest side
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_MERGING = "mistral3", "mistral_large4", "lighton_ocr"  # several patches to a token


class PixtralProcessor:
    """A token for each square of `unit` pixels, its patches or groups of them. With `detail` low, images are made to
    fit into OpenAI's 512 pixels.
    """

    placeholder: ClassVar[str] = "[IMG]"
    image_token = "[IMG]"
    options: ClassVar[frozenset[str]] = frozenset({"size", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        merge = config.get("spatial_merge_size", 2) if config.get("model_type") in _MERGING else 1
        self.unit = vision.get("patch_size", 16) * merge
        self.reader = PixelReader(preprocessor)
        self.longest = longest_edge(preprocessor.get("size") or {}, 1024)
        self.limit = max(self.longest, vision.get("image_size", 1024))

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        grids = [grid(height, width, self._longest(options), self.unit) for width, height in sizes]
        return [rows * columns for rows, columns in grids]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        return [self._process(image, self._longest(options)) for image in images]

    def _longest(self, options: dict[str, Any]) -> int:
        low = chosen_detail(options) == "low"
        return chosen_edge(options, "size", min(self.longest, _LOW) if low else self.longest, self.limit)

    def _process(self, image: Image.Image, longest: int) -> ProcessedImage:
        rows, columns = grid(image.height, image.width, longest, self.unit)
        pixels = self.reader.numbers([self.reader.resize(image, rows * self.unit, columns * self.unit)])[0]
        text = (self.image_token + _BREAK) * (rows - 1) + self.image_token + _END
        return ProcessedImage({"pixel_values": pixels}, text, [columns] * rows)


class LightOnOCRProcessor(PixtralProcessor):
    """The tokens of all rows follow one another. Images have whole patches, or whole tokens if `patch_size` of the
    preprocessor is that of a token.
    """

    placeholder: ClassVar[str] = "<|image_pad|>"
    image_token = "<|image_pad|>"

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        super().__init__(config | {"model_type": "lighton_ocr"}, preprocessor)
        patch = preprocessor.get("patch_size") or config["vision_config"].get("patch_size", 14)
        self.patch = one_side("preprocessor_config.json: patch_size", patch)

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        pixels = [self._pixels(height, width, self._longest(options)) for width, height in sizes]
        return [(height // self.unit) * (width // self.unit) for height, width in pixels]

    def _pixels(self, height: int, width: int, longest: int) -> tuple[int, int]:
        rows, columns = grid(height, width, longest, self.patch)
        return max(rows * self.patch, self.unit), max(columns * self.patch, self.unit)

    def _process(self, image: Image.Image, longest: int) -> ProcessedImage:
        height, width = self._pixels(image.height, image.width, longest)
        pixels = self.reader.numbers([self.reader.resize(image, height, width)])[0]
        return ProcessedImage(
            {"pixel_values": pixels}, self.image_token, [(height // self.unit) * (width // self.unit)]
        )


def longest_edge(size: dict[str, int], default: int) -> int:
    """Return the longest side of `size` of a preprocessor_config.json. Raises ValueError if it names different
    sides.
    """
    sides = {size[key] for key in ("longest_edge", "height", "width") if size.get(key)} or {default}
    if len(sides) > 1:
        raise ValueError(f"preprocessor_config.json: size {size} is not supported: use longest_edge")
    return sides.pop()


def grid(height: int, width: int, longest: int, unit: int) -> tuple[int, int]:
    """Return rows and columns of tokens of an image, which is made smaller to fit into a square of `longest` pixels."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = max(1, int(height / ratio)), max(1, int(width / ratio))
    return -(-height // unit), -(-width // unit)
