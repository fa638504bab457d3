"""Videos of InternVL: each frame is a tile, after its number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.server.media.families.internvl import InternVLProcessor
from quire.server.media.processor import ProcessedImage, ProcessedVideo
from quire.server.media.video.processor import SAMPLING_OPTIONS, Sampling, VideoFacts

_UNKNOWN_FPS = 24.0


class InternVLVideoProcessor:
    """The frames lie in the middle of equal parts of the video."""

    placeholder: ClassVar[str] = "<video>"
    token = InternVLProcessor.image_token
    options: ClassVar[frozenset[str]] = SAMPLING_OPTIONS
    sampling: ClassVar[dict[str, Any]] = {"num_frames": 32, "min_frames": 1, "max_frames": 768}

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        image = {name: value for name, value in preprocessor.items() if name != "size"}
        self._tile = InternVLProcessor(config, image)
        size = preprocessor.get("size") or {}
        if found := {size[name] for name in ("height", "width") if name in size} - {self._tile.side}:
            raise ValueError(f"size of video frames {found.pop()} must be the encoder's image_size, {self._tile.side}")
        self.bytes_per_token = 4 * 3 * self._tile.side**2 // self._tile.tokens
        self.preprocessor = preprocessor

    def indices(self, facts: VideoFacts, options: dict[str, Any]) -> list[int]:
        if facts.is_sampled:
            return list(range(facts.num_frames))
        sampling, total = Sampling.read(self.preprocessor, options, self.sampling), facts.num_frames
        counts = [] if sampling.num_frames is None else [sampling.num_frames]
        if sampling.fps is not None:
            counts.append(max(int(total / (facts.fps or _UNKNOWN_FPS) * sampling.fps), sampling.fewest))
        num_frames = min(min(counts), total, sampling.most)
        step = total / num_frames
        return [int(np.float32(self._shift(step) + i * step)) for i in range(num_frames)]

    def _shift(self, step: float) -> float:
        """Return the first place; `initial_shift` of the file is a number, or whether it is half of a part."""
        shift = self.preprocessor.get("initial_shift", True)
        if isinstance(shift, bool):
            return step / 2 if shift else 0.0
        return min(float(shift), step)

    def num_tokens(self, facts: VideoFacts, options: dict[str, Any]) -> int:
        return self._tile.tokens * len(self.indices(facts, options))

    def most_tokens(self, options: dict[str, Any]) -> int:
        return self._tile.tokens * Sampling.read(self.preprocessor, options, self.sampling).most

    def __call__(
        self, facts: VideoFacts, indices: list[int], frames: Iterable[Image.Image], options: dict[str, Any]
    ) -> ProcessedVideo:
        tile = self._tile
        resized = (tile.reader.resize(frame, tile.side, tile.side) for frame in frames)
        parts = [ProcessedImage({"pixel_values": tile.reader.numbers([one])}, "", [tile.tokens]) for one in resized]
        text = "\n".join(f"Frame{i}: <img>{self.token}</img>" for i in range(1, len(indices) + 1))
        return ProcessedVideo(text, parts)
