"""A family's preprocessing of videos: chosen frames in, features for the worker and text for the prompt out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from PIL import Image

from quire.configs.media_limits import MAX_FPS, MAX_FRAMES
from quire.server.media.processor import ProcessedVideo
from quire.server.values import Json


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """A video as its header describes it: the size of its frames as they are shown, their number, and frames per
    second, None if unknown. `is_sampled`: the client chose the frames, so that all are used.
    """

    width: int
    height: int
    num_frames: int
    fps: float | None
    is_sampled: bool = False


class VideoProcessor(Protocol):
    """A model's video processor, made once from its folder; called in threads, so that its state never changes."""

    placeholder: ClassVar[str]  # what the chat template writes for a video
    token: str  # the token that embeddings replace
    options: ClassVar[frozenset[str]]  # names of mm_processor_kwargs
    bytes_per_token: int  # of features

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        """Read `config`, config.json, and `preprocessor`, video_preprocessor_config.json or its substitute. Raises
        ValueError naming a setting that is not supported.
        """

    def indices(self, facts: VideoFacts, options: dict[str, Any]) -> list[int]:
        """Return the indices of the frames that the model sees, ascending, at least one. Raises ValueError."""

    def num_tokens(self, facts: VideoFacts, options: dict[str, Any]) -> int:
        """Return the number of tokens that embeddings replace. Raises ValueError, for the client."""

    def most_tokens(self, options: dict[str, Any]) -> int:
        """Return the most tokens of any video."""

    def __call__(
        self, facts: VideoFacts, indices: list[int], frames: Iterable[Image.Image], options: dict[str, Any]
    ) -> ProcessedVideo:
        """Return the video of these `frames` at `indices`, in RGB and upright. Raises ValueError, for the client."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The number of frames: from the `options` of that name, else the model's file, else the family's default."""

    num_frames: int | None
    fps: float | None
    fewest: int
    most: int

    @classmethod
    def read(cls, preprocessor: dict[str, Any], options: dict[str, Any], defaults: dict[str, Any]) -> Sampling:
        """Return the settings. One of num_frames and fps in a place replaces both of the places after it; if a place
        has both, the fewer frames count. Raises ValueError naming an option.
        """
        places = options, preprocessor, defaults
        chosen = next(place for place in places if {place.get("num_frames"), place.get("fps")} != {None})
        fewest, most = (
            _count(name, next(place[name] for place in places if place.get(name) is not None)) for name in _LIMITS
        )
        num_frames, fps = chosen.get("num_frames"), chosen.get("fps")
        return cls(
            None if num_frames is None else _count("num_frames", num_frames),
            None if fps is None else _rate(fps),
            min(fewest, most),
            most,
        )


_LIMITS = "min_frames", "max_frames"
SAMPLING_OPTIONS = frozenset({"num_frames", "fps", *_LIMITS})


def _count(name: str, value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_FRAMES:
        raise ValueError(f"{name} must be an integer from 1 to {MAX_FRAMES}, not {value!r}")
    return value


def _rate(value: Json) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_FPS:
        raise ValueError(f"fps must be a number above 0 and at most {MAX_FPS:g}, not {value!r}")
    return value
