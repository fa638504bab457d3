"""Gemma 3, whose images are squares of one size, and Gemma 4, whose images keep their shape."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.pixels import HALF, PixelReader, chosen_bool, chosen_detail, chosen_int, one_side
from quire.server.media.processor import ProcessedImage

_MAX_CROPS = 16
_PAN_AND_SCAN = "pan_and_scan_"


class Gemma3Processor:
    """Prepares images for Gemma 3. With pan and scan (option `do_pan_and_scan`), crops of a long image follow the whole
    one.
    """

    placeholder: ClassVar[str] = "<start_of_image>"
    image_token = "<image_soft_token>"
    options: ClassVar[frozenset[str]] = frozenset(
        {"do_pan_and_scan"}
        | {_PAN_AND_SCAN + name for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")}
    )

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        self.side = one_side("image_size", config["vision_config"].get("image_size", 224))
        if (side := one_side("size", preprocessor.get("size") or self.side)) != self.side:
            raise ValueError(f"preprocessor_config.json: size {side} is not vision_config.image_size {self.side}")
        self.reader = PixelReader(preprocessor, HALF, HALF, Image.Resampling.BILINEAR)
        self.count = config.get("mm_tokens_per_image", 256)
        self.defaults = {name: preprocessor[name] for name in self.options if preprocessor.get(name) is not None}

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        options = self.defaults | options
        return [self.count * (1 + len(self._ranges(width, height, options))) for width, height in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        options = self.defaults | options
        return [self._process(image, self._crops(image, options)) for image in images]

    def _process(self, image: Image.Image, crops: list[Image.Image]) -> ProcessedImage:
        squares = [self.reader.resize(part, self.side, self.side) for part in (image, *crops)]
        one = f"\n\n{self.placeholder}{self.image_token}<end_of_image>\n\n"
        text = one
        if crops:  # the words that the model was trained with
            others = " ".join([one] * len(crops))
            text = f"Here is the original image {one} and here are some crops to help you see better {others}"
        return ProcessedImage({"pixel_values": self.reader.numbers(squares)}, text, [self.count] * len(squares))

    def _crops(self, image: Image.Image, options: dict[str, Any]) -> list[Image.Image]:
        """Return equal parts of an image that is far from square, along its longer side."""
        wide, short = image.width >= image.height, min(image.size)
        ranges = self._ranges(*image.size, options)
        return [image.crop((a, 0, b, short) if wide else (0, a, short, b)) for a, b in ranges]

    def _ranges(self, width: int, height: int, options: dict[str, Any]) -> list[tuple[int, int]]:
        """Return (begin, end) of each part, in pixels."""
        if not chosen_bool(options, "do_pan_and_scan", False):
            return []
        least = chosen_int(options, f"{_PAN_AND_SCAN}min_crop_size", 256, 1 << 16)
        most = chosen_int(options, f"{_PAN_AND_SCAN}max_num_crops", 4, _MAX_CROPS)
        long, short = max(width, height), min(width, height)
        if long / short < _chosen_ratio(options):
            return []
        number = min(most, max(2, min(long // least, math.floor(long / short + 0.5))))
        step = math.ceil(long / number)
        if min(step, short) < least:
            return []
        return [(start, min(start + step, long)) for start in range(0, long, step)]


def _chosen_ratio(options: dict[str, Any]) -> float:
    name = f"{_PAN_AND_SCAN}min_ratio_to_activate"
    ratio = options.get(name, 1.2)
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not ratio > 0:
        raise ValueError(f"mm_processor_kwargs.{name} must be a number above 0, not {ratio!r}")
    return ratio


class Gemma4Processor:
    """A token for each square of `pool` x `pool` patches, as many as `max_soft_tokens` allows."""

    placeholder: ClassVar[str] = "<|image|>"
    image_token = "<|image|>"
    options: ClassVar[frozenset[str]] = frozenset({"max_soft_tokens", "detail"})
    budgets = (70, 140, 280, 560, 1120)

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.reader = PixelReader({"do_normalize": False} | preprocessor, (0.0,) * 3, (1.0,) * 3)
        self.patch = preprocessor.get("patch_size") or vision.get("patch_size", 16)
        self.pool = preprocessor.get("pooling_kernel_size") or vision.get("pooling_kernel_size", 3)
        self.budget = preprocessor.get("max_soft_tokens") or 280

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        unit, budget = self.pool * self.patch, self._budget(options)
        return [math.prod(fitting_grid(height, width, unit, budget)) for width, height in sizes]

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        budget = self._budget(options)
        return [self._process(image, budget) for image in images]

    def _budget(self, options: dict[str, Any]) -> int:
        low = chosen_detail(options) == "low"
        budget = options.get("max_soft_tokens", self.budgets[0] if low else self.budget)
        if budget not in self.budgets:
            known = ", ".join(map(str, self.budgets))
            raise ValueError(f"mm_processor_kwargs.max_soft_tokens must be one of {known}, not {budget!r}")
        return budget

    def _process(self, image: Image.Image, budget: int) -> ProcessedImage:
        unit, patch = self.pool * self.patch, self.patch
        rows, columns = fitting_grid(image.height, image.width, unit, budget)
        pixels = self.reader.numbers([self.reader.resize(image, rows * unit, columns * unit)])[0]
        grid = rows * self.pool, columns * self.pool
        patches = pixels.reshape(3, grid[0], patch, grid[1], patch).transpose(1, 3, 2, 4, 0)
        features = {"pixel_values": np.ascontiguousarray(patches).reshape(-1, 3 * patch**2), "grid": np.asarray(grid)}
        return ProcessedImage(features, f"<|image>{self.image_token}<image|>", [rows * columns])


def fitting_grid(height: int, width: int, unit: int, budget: int) -> tuple[int, int]:
    """Return the largest (rows, columns) of `unit`-pixel squares, at most `budget`, of the image's shape."""
    factor = math.sqrt(budget * unit**2 / (height * width))
    rows, columns = (math.floor(factor * side / unit) for side in (height, width))
    if not rows:
        return 1, min(width // height, budget)
    return (rows, columns) if columns else (min(height // width, budget), 1)
