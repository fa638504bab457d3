"""An image or a video as a client sends it, and its preprocessed form. Loads neither numpy nor Pillow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video"]
MEDIA: tuple[MediaKind, ...] = ("image", "video")
ORDINAL = "\0"  # in the text of a medium: how many of its kind come before it in the prompt


@dataclass(slots=True, eq=False, kw_only=True)
class MediaInput:
    """One of `url`, `base64`, `picture` and `uuid` names the content; `uuid` may also name one that comes with it.

    `param` is the field of the request that holds it, for error messages.
    """

    param: str
    kind: MediaKind = "image"
    url: str | None = None  # data:, http:, https: or file:
    base64: str | None = None
    picture: object = None  # offline: a PIL.Image.Image, or a `video.frames.Clip`
    detail: Literal["low", "high", "auto"] | None = None
    uuid: str | None = None
    lease: Lease | None = None  # once it is loaded


def counted(media: Iterable[MediaInput]) -> str:
    """Return, for an error, the numbers of images and videos, such as "2 images and 1 videos"."""
    kinds = [one.kind for one in media]
    return " and ".join(f"{kinds.count(name)} {name}s" for name in MEDIA if name in kinds)


@dataclass(frozen=True, slots=True)
class PreparedPart:
    """The part of a medium that is encoded by itself, an image or some frames of a video: its features lie in a file.
    `counts`, `grid` and `time` are as in `ProcessedImage`.
    """

    key: str  # hash of the content and the preprocessing settings
    path: str
    counts: list[int]
    grid: tuple[int, int, int] | None = None
    time: int | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that embeddings replace."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PreparedMedium:
    """A preprocessed image or video. `text` has the runs of tokens of all parts, in order."""

    key: str
    num_bytes: int
    text: str
    parts: list[PreparedPart]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that embeddings replace."""
        return sum(part.num_tokens for part in self.parts)


class Lease:
    """A reference that keeps the files of a medium until `release` or garbage collection. `found`: it was already
    preprocessed; otherwise preprocessing took `seconds`.
    """

    __slots__ = ("_end", "_lock", "found", "medium", "seconds")

    def __init__(self, medium: PreparedMedium, end: Callable[[str], None]):
        self.medium = medium
        self.found, self.seconds = True, 0.0
        self._lock = threading.Lock()
        self._end: Callable[[str], None] | None = end

    def release(self) -> None:
        """Give the lease back. Idempotent and thread-safe."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end(self.medium.key)

    def __del__(self) -> None:
        self.release()
