"""The bytes of an image, from anywhere -> an RGB image, upright. Runs in threads.

Formats are few, because each decoder is code that strangers reach. Sizes are checked before pixels are decoded.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# a scan of a progressive JPEG costs as much as the whole image and may have two bytes; encoders write about ten
MAX_SCANS = 100
_SCAN = b"\xff\xda"
WHITE = (255, 255, 255)
# bytes per pixel for the decoded image, its RGB copy and intermediates; Pillow takes 4 for RGB and RGBA
_BYTES_PER_PIXEL, _OTHER_BYTES = {"RGB": 12, "L": 8, "1": 8}, 20
_STRIP_PIXELS = 2**16  # per image of numbers, converted at once
# for damaged files, for the log of a program that opened them itself; Python would remember each text
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the first frame, in RGB, turned as EXIF says. Transparent parts are white, as in vLLM.

    Raises ValueError, for the client, if the bytes are no image of `FORMATS`, are damaged, or have more than
    `max_pixels` pixels.
    """
    with _opened(data, max_pixels) as image:
        return to_rgb(image)


def header(data: bytes, max_pixels: int) -> tuple[int, int, int]:
    """Return width, height (not turned) and an estimate of the bytes that decoding takes, from the header alone. Raises
    ValueError as `decode` does.
    """
    with _opened(data, max_pixels) as image:
        width, height = image.size
        mode = "RGBA" if "transparency" in image.info else image.mode
        return width, height, width * height * _BYTES_PER_PIXEL.get(mode, _OTHER_BYTES)


@contextlib.contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    if data.count(_SCAN) > MAX_SCANS and data[:2] == b"\xff\xd8":
        raise ValueError(f"the JPEG has more than {MAX_SCANS} scans")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, max_pixels)
            yield image
    except Image.UnidentifiedImageError:
        raise ValueError(f"it is not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {max_pixels} pixels (--max-image-pixels)") from None
    except ValueError:
        raise
    except Exception as error:  # decoders raise anything for damaged files: OSError, SyntaxError, struct.error ...
        raise ValueError(f"it cannot be decoded: {str(error)[:200] or type(error).__name__}") from None


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(
            f"it has {width} x {height} pixels, which is more than {max_pixels} in all (--max-image-pixels)"
        )
    if not (width and height):
        raise ValueError("it has no pixels")


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a new image in RGB, upright. Raises ValueError for pixel values that are no brightness."""
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(behind, image).convert("RGB")
    if image.mode.startswith("I") or image.mode == "F":
        return _from_numbers(image)
    return image.convert("RGB")


def _from_numbers(image: Image.Image) -> Image.Image:
    """Return an image of 16 or more bits per pixel as brightness from 0 to 65,535, or to 255 if no value is larger;
    Pillow would clip the values.
    """
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):
        raise ValueError("its pixels are numbers below 0 or above 65535")
    divisor = 257 if high > 255 or image.mode.startswith("I;16") else 1
    brightness = np.empty(values.shape, np.uint8)
    rows = max(1, _STRIP_PIXELS // values.shape[1])
    for first in range(0, len(values), rows):  # in floats, which take eight times the memory
        strip = slice(first, first + rows)
        brightness[strip] = np.rint(values[strip] / divisor)
    return Image.fromarray(brightness, "L").convert("RGB")
