"""A family's preprocessing of images: a decoded image in, features for the worker and text for the prompt out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from PIL import Image


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image, ready for the worker.

    `text` replaces the image's placeholder in the rendered prompt. A run of image tokens stands in it as one; the k-th
    one in `text` is repeated `counts[k]` times after tokenizing, so that long runs are not tokenized.
    """

    features: dict[str, np.ndarray]  # by the names that the model's encoder in worker/models/vision expects
    text: str
    counts: list[int]
    grid: tuple[int, int, int] | None = None  # (t, h, w) in image tokens, for models with three axes of positions
    time: int | None = None  # as in `MediaItem`, for frames

    @property
    def parts(self) -> list[ProcessedImage]:
        """Return what is encoded by itself: the image."""
        return [self]


@dataclass(frozen=True, slots=True)
class ProcessedVideo:
    """One video. `parts` are its frames, or pairs of them, each without a text; `text` replaces the placeholder of the
    video and has the runs of tokens of all parts.
    """

    text: str
    parts: list[ProcessedImage]


class ImageProcessor(Protocol):
    """A model's image processor, made once from its folder; called in threads, so that its state never changes."""

    placeholder: ClassVar[str]  # the placeholder in the chat template
    image_token: str  # the token that embeddings replace
    # names of mm_processor_kwargs that it reads; `detail` among them gets the images' detail, low or high
    options: ClassVar[frozenset[str]]
    # whether features depend on the number of images; if not (or not set), it may be given only some of them
    sized_by_number: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        """Create a processor: `config` is config.json, `preprocessor` preprocessor_config.json (or the image
        processor's part of processor_config.json); empty if there is none. Raises ValueError naming a setting that is
        not supported.
        """

    def num_tokens(self, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[int]:
        """Return the number of image tokens of each image of one prompt, by their widths and heights alone.

        Raises ValueError as `__call__` does.
        """

    def __call__(self, images: list[Image.Image], options: dict[str, Any]) -> list[ProcessedImage]:
        """Return the images of one prompt, in RGB and upright, in order; each on its own unless `sized_by_number`.

        Raises ValueError, for the client, for an image or an option that the model cannot take.
        """
