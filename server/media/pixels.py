"""Converts Pillow's images to the values that encoders read, and the settings that families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from quire.server.values import Json

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
# bounds the size that a client's option or a thin image can request
MAX_PIXELS = 1 << 26


class PixelReader:
    """Resizes images and scales their values, as preprocessor_config.json says.

    Pillow resizes images as bytes, as in the models' training.
    """

    def __init__(
        self,
        preprocessor: dict[str, Any],
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        resample: Image.Resampling = Image.Resampling.BICUBIC,
    ):
        """Read the settings; arguments after the first are the family's defaults. Raises ValueError for others."""
        for key in ("do_resize", "do_rescale"):
            if not preprocessor.get(key, True):
                raise ValueError(f"preprocessor_config.json: {key} false is not supported")
        factor = preprocessor.get("rescale_factor", 1 / 255)
        self.mean = tuple(preprocessor.get("image_mean") or mean)
        normalize = preprocessor.get("do_normalize", True)
        means, stds = (self.mean, preprocessor.get("image_std") or std) if normalize else (0.0, 1.0)
        self.scale = (factor / np.asarray(stds)).astype(np.float32)
        self.offset = (np.asarray(means) / np.asarray(stds)).astype(np.float32)
        self.resample = Image.Resampling(preprocessor.get("resample", resample))

    def resize(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Return the resized image. Raises ValueError if the result would be larger than MAX_PIXELS."""
        if height * width > MAX_PIXELS:
            raise ValueError(
                f"an image of {image.width}x{image.height} pixels would be resized to {width}x{height}, which is more "
                f"than {MAX_PIXELS} pixels; crop it, or send smaller options in mm_processor_kwargs"
            )
        return image.resize((width, height), self.resample)

    def numbers(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return `[len(images), 3, height, width]` float32 of RGB images of one size."""
        pixels = np.stack([np.asarray(image) for image in images])
        return np.ascontiguousarray((pixels * self.scale - self.offset).transpose(0, 3, 1, 2))


def tiles(image: Image.Image, side: int) -> list[Image.Image]:
    """Return the squares of an image whose sides are multiples of `side`, row by row."""
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


def padded(image: Image.Image, height: int, width: int, color: tuple[int, int, int] = (0, 0, 0)) -> Image.Image:
    """Return the image in the middle of a canvas."""
    canvas = Image.new("RGB", (width, height), color)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas


def padded_to_square(image: Image.Image, mean: Sequence[float]) -> Image.Image:
    """Return the image in the middle of a square of the mean color."""
    side = max(image.size)
    return padded(image, side, side, tuple(int(value * 255) for value in mean))


def one_side(name: str, value: Json) -> int:
    """Return the side of a square that a configuration gives as a number or as height and width. Raises ValueError if
    it is no square.
    """
    if isinstance(value, dict):
        value = [value[key] for key in ("shortest_edge", "height", "width") if value.get(key) is not None]
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name} {value} is not supported: only squares are")
    return sides.pop()


def chosen_int(options: dict[str, Any], name: str, default: int, limit: int) -> int:
    """Return an option of a client. Raises ValueError unless it is from 1 to `limit`."""
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ValueError(f"mm_processor_kwargs.{name} must be an integer from 1 to {limit}, not {value!r}")
    return value


def chosen_bool(options: dict[str, Any], name: str, default: bool) -> bool:
    """Return an option of a client. Raises ValueError unless it is true or false."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"mm_processor_kwargs.{name} must be true or false, not {value!r}")
    return value


def chosen_edge(options: dict[str, Any], name: str, default: int, limit: int) -> int:
    """Return an option of a client that is {"longest_edge": N}. Raises ValueError unless N is from 1 to `limit`."""
    value = options.get(name, {"longest_edge": default})
    if not isinstance(value, dict) or set(value) != {"longest_edge"}:
        raise ValueError(f'mm_processor_kwargs.{name} must be {{"longest_edge": N}}, not {value!r}')
    return chosen_int(value, "longest_edge", default, limit)


def chosen_detail(options: dict[str, Any]) -> str:
    """Return the option `detail` of OpenAI's images: low, high or auto. Raises ValueError for another value."""
    value = options.get("detail", "auto")
    if value not in ("low", "high", "auto"):
        raise ValueError(f"mm_processor_kwargs.detail must be low, high or auto, not {value!r}")
    return value
