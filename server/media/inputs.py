"""An image as a client sends it, and its preprocessed form. Loads neither numpy nor Pillow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, eq=False, kw_only=True)
class ImageInput:
    """One of `url`, `base64`, `picture` and `uuid` names the image; `uuid` may also name one that comes with it.

    `param` is the field of the request that holds it, for error messages.
    """

    param: str
    url: str | None = None  # data:, http:, https: or file:
    base64: str | None = None
    picture: object = None  # a PIL.Image.Image, offline
    detail: Literal["low", "high", "auto"] | None = None
    uuid: str | None = None
    lease: Lease | None = None  # once it is loaded


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A preprocessed image whose features lie in a file. `text`, `counts` and `grid` are as in `ProcessedImage`."""

    key: str  # hash of the content and of the settings of preprocessing
    path: str
    num_bytes: int
    text: str
    counts: list[int]
    grid: tuple[int, int, int] | None

    @property
    def num_tokens(self) -> int:
        """Tokens that embeddings replace."""
        return sum(self.counts)


class Lease:
    """A reference that keeps the file of an image until `release`, or until the lease is collected. `found`: the image
    was preprocessed before, else it took `seconds`.
    """

    __slots__ = ("_end", "_lock", "found", "image", "seconds")

    def __init__(self, image: PreparedImage, end: Callable[[str], None]):
        self.image = image
        self.found, self.seconds = True, 0.0
        self._lock = threading.Lock()
        self._end: Callable[[str], None] | None = end

    def release(self) -> None:
        """Idempotent; may be called in any thread."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end(self.image.key)

    def __del__(self) -> None:
        self.release()
