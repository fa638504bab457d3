"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pairs of frames, each encoded like an image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.qwen_vl import MAX_RATIO, patches, smart_size
from quire.server.media.pixels import HALF, MAX_PIXELS, PixelReader, chosen_bool, chosen_int
from quire.server.media.processor import ProcessedImage, ProcessedVideo
from quire.server.media.video.processor import SAMPLING_OPTIONS, Sampling, VideoFacts

_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of the limits in `size`
_UNKNOWN_FPS = 24.0  # as transformers has it
_SIDE = 4096  # of the largest frames tried for the most tokens


class Qwen2VLVideoProcessor:
    """The frames of a video follow each other without text; a pair has the same place on the axis of time."""

    placeholder: ClassVar[str] = "<|video_pad|>"
    token = "<|video_pad|>"
    options: ClassVar[frozenset[str]] = SAMPLING_OPTIONS | {"min_pixels", "max_pixels", "size", "cap_pixels_per_frame"}
    sampling: ClassVar[dict[str, Any]] = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    edges: ClassVar[dict[str, int]] = {"min_pixels": 128 * 28 * 28, "max_pixels": 28 * 28 * 768}
    patch_size: ClassVar[int] = 14
    max_video_tokens: ClassVar[int] = 128_000  # that share the pixels of a video with `cap_pixels_per_frame`
    colors: ClassVar[dict[str, Any]] = {}  # mean and std where the file names none

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        vision = config["vision_config"]
        self.reader = PixelReader(preprocessor, **self.colors)
        self.patch = preprocessor.get("patch_size") or vision.get("patch_size", self.patch_size)
        self.merge = preprocessor.get("merge_size") or vision.get("spatial_merge_size", 2)
        self.pair = preprocessor.get("temporal_patch_size") or vision.get("temporal_patch_size", 2)
        if self.pair != vision.get("temporal_patch_size", 2):
            raise ValueError(f"temporal_patch_size {self.pair} must be the encoder's")
        self.unit, self.preprocessor = self.patch * self.merge, preprocessor
        self.bytes_per_token = 4 * 3 * self.pair * self.unit**2
        size = preprocessor.get("size") or {}
        self.limits = {
            name: preprocessor.get(name) or size.get(edge) or size.get(name) or self.edges[name]
            for name, edge in _EDGES.items()
        }
        self.time_step = vision.get("tokens_per_second")  # positions of a second; None: each pair has one position

    # ---- the frames

    def indices(self, facts: VideoFacts, options: dict[str, Any]) -> list[int]:
        if facts.is_sampled:
            return list(range(facts.num_frames))
        return self._chosen(facts, Sampling.read(self.preprocessor, options, self.sampling))

    def _chosen(self, facts: VideoFacts, sampling: Sampling) -> list[int]:
        """Return the frames at equal distances, from the first."""
        total, pair = facts.num_frames, self.pair
        counts = []
        if sampling.num_frames is not None:
            counts.append(round(sampling.num_frames / pair) * pair)
        if sampling.fps is not None:
            most = min(sampling.most // pair * pair, total)
            wanted = min(max(total / (facts.fps or _UNKNOWN_FPS) * sampling.fps, sampling.fewest), most)
            counts.append(math.floor(wanted / pair) * pair)
        num_frames = min(max(min(counts), 1), total, sampling.most)
        return [int(np.float32(i * (total / num_frames))) for i in range(num_frames)]

    # ---- sizes

    def num_tokens(self, facts: VideoFacts, options: dict[str, Any]) -> int:
        num_frames = len(self.indices(facts, options))
        height, width = self._size(facts, num_frames, options)
        return -(-num_frames // self.pair) * (height * width // self.unit**2)

    def most_tokens(self, options: dict[str, Any]) -> int:
        most = Sampling.read(self.preprocessor, options, self.sampling).most
        return self.num_tokens(VideoFacts(_SIDE, _SIDE, most, None, is_sampled=True), options)

    def _size(self, facts: VideoFacts, num_frames: int, options: dict[str, Any]) -> tuple[int, int]:
        """Return height and width of the resized frames."""
        least, most = self._pixels(options)
        if self._capped(options):
            budget = int(self.max_video_tokens * self.unit**2 * 0.9)
            most = max(min(most, budget * self.pair // num_frames), int(least * 1.05))
        return smart_size(facts.height, facts.width, self.unit, least, most)

    def _capped(self, options: dict[str, Any]) -> bool:
        return chosen_bool(options, "cap_pixels_per_frame", bool(self.preprocessor.get("cap_pixels_per_frame")))

    def _pixels(self, options: dict[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most pixels, of a frame or of all frames as the family counts."""
        size = options.get("size", {})
        if not isinstance(size, dict) or not set(size) <= set(_EDGES.values()):
            raise ValueError(
                f"mm_processor_kwargs.size must have shortest_edge and longest_edge in pixels, not {size!r}"
            )
        given = {name: size[edge] for name, edge in _EDGES.items() if edge in size} | options
        least, most = (chosen_int(given, name, self.limits[name], 16 * MAX_PIXELS) for name in _EDGES)
        if least > most:
            raise ValueError(f"mm_processor_kwargs: min_pixels {least} is more than max_pixels {most}")
        return least, most

    # ---- features

    def __call__(
        self, facts: VideoFacts, indices: list[int], frames: Iterable[Image.Image], options: dict[str, Any]
    ) -> ProcessedVideo:
        height, width = self._size(facts, len(indices), options)
        rows, columns = height // self.unit, width // self.unit
        grid = 1, height // self.patch, width // self.patch
        times = self._times(facts, indices)
        parts = [
            ProcessedImage(
                {"pixel_values": patches(self.reader.numbers(pair), self.patch, self.merge), "grid": np.asarray(grid)},
                "",
                [rows * columns],
                (1, rows, columns),
                time,
            )
            for pair, time in zip(self._pairs(frames, height, width), times, strict=True)
        ]
        return ProcessedVideo(self._text(facts, indices), parts)

    def _pairs(self, frames: Iterable[Image.Image], height: int, width: int) -> Iterator[list[Image.Image]]:
        """Yield resized frames that are encoded together; the last one stands for those that lack."""
        pair: list[Image.Image] = []
        for frame in frames:
            pair.append(self.reader.resize(frame, height, width))
            if len(pair) == self.pair:
                yield pair
                pair = []
        if pair:
            yield pair + pair[-1:] * (self.pair - len(pair))

    def _times(self, facts: VideoFacts, indices: list[int]) -> list[int | None]:
        """Return the `MediaItem.time` of each pair."""
        count = -(-len(indices) // self.pair)
        step = np.float32(1)
        if self.time_step is not None:
            step = np.float32(self.time_step) * np.float32(self.pair / self._sampled_fps(facts, indices))
        return [None, *(int(np.float32(i) * step) for i in range(1, count))]

    def _sampled_fps(self, facts: VideoFacts, indices: list[int]) -> float:
        if facts.is_sampled:
            return facts.fps or self._own_fps()
        return len(indices) / facts.num_frames * (facts.fps or _UNKNOWN_FPS)

    def _own_fps(self) -> float:
        """Return the rate of frames that the client chose, if it names none: that at which the model sees videos."""
        return self.preprocessor.get("fps") or self.sampling["fps"]

    def _text(self, facts: VideoFacts, indices: list[int]) -> str:
        return self.token * -(-len(indices) // self.pair)


class Qwen3VLVideoProcessor(Qwen2VLVideoProcessor):
    """The time of each pair of frames is written before it; limits are pixels of all frames."""

    placeholder: ClassVar[str] = "<|vision_start|><|video_pad|><|vision_end|>"
    edges: ClassVar[dict[str, int]] = {"min_pixels": 128 * 32 * 32, "max_pixels": 32 * 32 * 768}
    patch_size: ClassVar[int] = 16
    max_video_tokens: ClassVar[int] = 768  # of a frame
    colors: ClassVar[dict[str, Any]] = {"mean": HALF, "std": HALF}

    def _chosen(self, facts: VideoFacts, sampling: Sampling) -> list[int]:
        """Return the frames at equal distances, from the first to the last."""
        total = facts.num_frames
        counts = [] if sampling.num_frames is None else [sampling.num_frames]
        if sampling.fps is not None:
            wanted = int(total / (facts.fps or _UNKNOWN_FPS) * sampling.fps)
            counts.append(min(max(wanted, sampling.fewest), sampling.most))
        num_frames = min(min(counts), total, sampling.most)
        return np.linspace(0, total - 1, num_frames).round().astype(int).tolist()

    def _size(self, facts: VideoFacts, num_frames: int, options: dict[str, Any]) -> tuple[int, int]:
        least, most = self._pixels(options)
        num_frames = max(num_frames, self.pair)
        if self._capped(options):
            share = min(self.max_video_tokens * self.unit**2, most // num_frames)
            most = max(share, int(least * 1.05)) * num_frames
        return size_of_frames(num_frames, facts.height, facts.width, self.pair, self.unit, least, most)

    def _times(self, facts: VideoFacts, indices: list[int]) -> list[int | None]:
        return [None] * -(-len(indices) // self.pair)

    def _text(self, facts: VideoFacts, indices: list[int]) -> str:
        fps = (facts.fps or self._own_fps()) if facts.is_sampled else facts.fps or _UNKNOWN_FPS
        padded = [*indices, *indices[-1:] * (-len(indices) % self.pair)]
        seconds = [(padded[i] / fps + padded[i + self.pair - 1] / fps) / 2 for i in range(0, len(padded), self.pair)]
        return "".join(f"<{one:.1f} seconds>{self.placeholder}" for one in seconds)


def size_of_frames(
    num_frames: int, height: int, width: int, pair: int, unit: int, least: int, most: int
) -> tuple[int, int]:
    """Return multiples of `unit` near the sides of a frame, so that all frames together have from `least` to `most`
    pixels as far as the shape allows that. Raises ValueError for a frame that is too long for its width, or the other
    way round.
    """
    if min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_RATIO:
        raise ValueError(f"one side is {ratio:.0f} times as long as the other, and the limit is {MAX_RATIO}")
    rows, columns = round(height / unit), round(width / unit)
    pixels = round(num_frames / pair) * pair * rows * columns * unit**2
    if pixels > most:
        factor = math.sqrt(num_frames * height * width / most)
        rows, columns = (max(1, math.floor(side / factor / unit)) for side in (height, width))
    elif pixels < least:
        factor = math.sqrt(least / (num_frames * height * width))
        rows, columns = (math.ceil(side * factor / unit) for side in (height, width))
    return rows * unit, columns * unit
