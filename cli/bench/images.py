"""Makes random images for the dataset `random-mm`, with vLLM's flags."""

from __future__ import annotations

import argparse
import ast
import base64
import io
import math
import random
from collections.abc import Callable

MAX_SIDE = 16384  # pixels
Bucket = tuple[int, int]  # height, width
_BUCKETS = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}
_LIMITS = {"image": 255, "video": 1}


def add_image_flags(group: argparse._ArgumentGroup, count: Callable[[str], int]) -> None:
    """Add the flags; `count` parses numbers that may be 0."""
    group.add_argument(
        "--random-mm-base-items-per-request",
        type=count,
        default=1,
        metavar="N",
        help="images per request (default: 1)",
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=_range_ratio,
        default=0.0,
        metavar="R",
        help="their number is uniform in floor(N * (1 - R)) to ceil(N * (1 + R)); R is 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--random-mm-limit-mm-per-prompt",
        type=limits,
        default=_LIMITS,
        metavar="JSON",
        help='maximum number of images per request: {"image": 3} (default: 255)',
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=buckets,
        default=buckets(str(_BUCKETS)),
        metavar="DICT",
        help="probabilities of sizes: {(height, width, 1): probability, ...}, normalized to 1 (default: 256 x 256 and "
        "720 x 1280, 0.5 each)",
    )


def _range_ratio(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return float(text)


def limits(text: str) -> dict[str, int]:
    given = _mapping(text)
    for name, value in given.items():
        if name not in ("image", "video", "audio"):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of image, video, audio")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise argparse.ArgumentTypeError(f"{name} must be a whole number of at least 0, got {value!r}")
    return given


def buckets(text: str) -> dict[Bucket, float]:
    """Return nonzero probabilities by height and width."""
    found: dict[Bucket, float] = {}
    for key, weight in _mapping(text).items():
        size = _literal(key) if isinstance(key, str) else key
        if not (isinstance(size, tuple) and len(size) == 3 and all(isinstance(side, int) for side in size)):
            raise argparse.ArgumentTypeError(f"{key!r} is not (height, width, number of frames)")
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise argparse.ArgumentTypeError(f"the probability of {key!r} must be at least 0, got {weight!r}")
        if weight == 0:
            continue
        height, width, frames = size
        if frames != 1 or not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
            raise argparse.ArgumentTypeError(
                f"{key!r} is not supported: only images, of one frame and sides of 1 to {MAX_SIDE} pixels"
            )
        found[height, width] = found.get((height, width), 0.0) + weight
    if not found:
        raise argparse.ArgumentTypeError("no size has a probability above 0")
    return found


def _mapping(text: str) -> dict:
    value = _literal(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected {{...}}, got {text}")
    return value


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"not a value of Python or JSON: {text}") from None


def number_range(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the fewest and the most images of a request. Raises ValueError if the limit is below the fewest."""
    base, ratio = arguments.random_mm_base_items_per_request, arguments.random_mm_num_mm_items_range_ratio
    limit = arguments.random_mm_limit_mm_per_prompt.get("image", 0)
    fewest, most = math.floor(base * (1 - ratio)), min(math.ceil(base * (1 + ratio)), limit)
    if fewest > most:
        raise ValueError(
            f"--random-mm-base-items-per-request asks for at least {fewest} images, and "
            f"--random-mm-limit-mm-per-prompt allows {limit}"
        )
    return fewest, most


def random_images(arguments: argparse.Namespace, rng: random.Random) -> tuple[str, ...]:
    """Return the images of one request, as data URLs. Raises ValueError."""
    sizes = arguments.random_mm_bucket_config
    number = rng.randint(*number_range(arguments))
    chosen = rng.choices(list(sizes), list(sizes.values()), k=number)
    return tuple(random_image(rng, *size) for size in chosen)


def random_image(rng: random.Random, height: int, width: int) -> str:
    """Return a new JPEG of noise as a data URL, which no cache contains."""
    from PIL import Image

    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(3 * height * width)).save(out, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
