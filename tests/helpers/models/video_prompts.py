"""Prompts with real videos for tiny models without a tokenizer, and transformers' answer to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from quire.configs.serving import MediaConfig
from quire.engine.messages import MediaItem
from quire.server.media.processor import ProcessedImage, ProcessedVideo
from quire.server.media.registry import load_video_processor
from quire.server.media.video.sources import Clip, FileSource
from tests.helpers.models.image_prompts import Prompt, Reference, Writer, picture
from tests.helpers.models.llava_models import IMAGE_TOKEN_ID
from tests.helpers.models.qwen_gemma_models import VIDEO_TOKEN_ID


@dataclass(frozen=True)
class Video:
    """Frames of a picture that moves."""

    seed: int
    num_frames: int
    width: int
    height: int
    fps: float = 8.0

    def clip(self) -> Clip | FileSource:
        size = self.width + self.num_frames, self.height
        whole = picture(self.seed, *size)
        frames = [np.asarray(whole.crop((i, 0, i + self.width, self.height))) for i in range(self.num_frames)]
        return Clip(np.stack(frames), self.fps)


@dataclass(frozen=True)
class VideoFile:
    """The bytes of a file, which the server's decoder reads."""

    data: bytes
    seed: int = 0

    def clip(self) -> Clip | FileSource:
        return FileSource(self.data, MediaConfig())


class VideoWriter(Writer):
    """A `Writer` that takes videos, too. `videos` of a prompt are those of its media that are videos."""

    def __init__(self, folder: str | Path, store: str | Path):
        super().__init__(folder, store)
        self.video_processor = load_video_processor(folder)
        self.video_token_id = IMAGE_TOKEN_ID if "IMG" in self.video_processor.token else VIDEO_TOKEN_ID

    def __call__(self, *parts: int | Image.Image | Video | VideoFile, **options: Any) -> VideoPrompt:
        prompt = VideoPrompt()
        for part in parts:
            if isinstance(part, int):
                prompt.token_ids.append(part)
            elif isinstance(part, Video | VideoFile):
                self._add_video(prompt, part, options)
            else:
                self._add(prompt, self.processor([part], options)[0])
                prompt.shown.append(prompt.images[-1].features["pixel_values"])
        return prompt

    def _add_video(self, prompt: VideoPrompt, video: Video | VideoFile, options: dict[str, Any]) -> None:
        clip = video.clip()
        indices = self.video_processor.indices(clip.facts, options)
        found = self.video_processor(clip.facts, indices, clip.frames(indices), options)
        clip.close()
        prompt.videos.append(found)
        prompt.shown += [part.features["pixel_values"] for part in found.parts]
        pieces = found.text.split(self.video_processor.token)
        assert len(pieces) == len(found.parts) + 1
        for piece, part in zip(pieces, found.parts):
            prompt.token_ids += [20 + len(piece) % 7] * bool(piece)
            path, key = self._write(part)
            (count,) = part.counts
            offset = len(prompt.token_ids)
            prompt.media.append(
                MediaItem(f"{key}-{video.seed}-{offset}", offset, count, count, path, part.grid, part.time)
            )
            prompt.token_ids += [self.video_token_id] * count
        prompt.token_ids += [20 + len(pieces[-1]) % 7] * bool(pieces[-1])


@dataclass
class VideoPrompt(Prompt):
    videos: list[ProcessedVideo] = field(default_factory=list)
    shown: list[np.ndarray] = field(default_factory=list)  # pixels of images and frames, in order


class VideoReference(Reference):
    """transformers' model with the images and videos of a prompt. `interval` are the seconds of a pair of frames;
    `positions` computes the three axes of token ids where they are not transformers' own.
    """

    def __init__(
        self, name: str, model: Any, prompt: VideoPrompt, interval: float | None = None, positions: Any = None
    ):
        super().__init__(name, model, prompt.images)
        self.positions = positions
        if prompt.videos and name == "internvl":
            self.inputs = {"pixel_values": torch.cat([torch.from_numpy(one) for one in prompt.shown])}
        elif prompt.videos:
            self.inputs["pixel_values_videos"] = torch.cat([_pixels(one).flatten(1) for one in prompt.videos])
            self.inputs["video_grid_thw"] = torch.stack([_grid(one.parts) for one in prompt.videos])
            if interval is not None:
                self.inputs["second_per_grid_ts"] = torch.tensor([interval] * len(prompt.videos))

    def __call__(self, token_ids: torch.Tensor) -> Any:
        inputs = dict(self.inputs)
        if inputs and self.name != "internvl":
            kinds = (token_ids == IMAGE_TOKEN_ID).int() + 2 * (token_ids == VIDEO_TOKEN_ID).int()
            inputs["mm_token_type_ids"] = kinds
        if inputs and self.positions is not None:
            inputs["position_ids"] = self.positions(token_ids[0].tolist())
        return self.model(token_ids, use_cache=False, **inputs)


def _pixels(video: ProcessedVideo) -> torch.Tensor:
    return torch.cat([torch.from_numpy(part.features["pixel_values"]) for part in video.parts])


def _grid(parts: Sequence[ProcessedImage]) -> torch.Tensor:
    _, rows, columns = parts[0].features["grid"].tolist()
    return torch.tensor([len(parts), rows, columns])


def published_positions(token_ids: list[int], grids: list[tuple[int, int, int]], interval: float) -> torch.Tensor:
    """Return the positions of a text with one kind of video as Qwen's own code of Qwen2-VL and Qwen2.5-VL numbers them:
    text continues one beyond the largest position before it. `grids` are in embeddings.
    """
    out, following, at = [[], [], []], 0, iter(grids)
    i = 0
    while i < len(token_ids):
        if token_ids[i] != VIDEO_TOKEN_ID:
            for axis in out:
                axis.append(following)
            i, following = i + 1, following + 1
            continue
        frames, rows, columns = next(at)
        base = following
        for t in range(frames):
            for row in range(rows):
                for column in range(columns):
                    place = base + int(t * interval), base + row, base + column
                    for axis, value in zip(out, place):
                        axis.append(value)
                    following = max(following, *(value + 1 for value in place))
        i += frames * rows * columns
    return torch.tensor(out)[:, None]
