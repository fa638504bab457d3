"""The images of the requests in the table: where their placeholders are in the prompts, and the positions of tokens on
three axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.worker.messages import MediaItem, NewRequest, StepInput
from quire.worker.spec.vision import VisionSpec


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt, the `number`-th."""

    number: int
    item: MediaItem
    places: np.ndarray  # [num_embeds] int64: indices of its placeholders in the prompt, ascending

    @property
    def end(self) -> int:
        """Return the index after the span's last token."""
        return self.item.offset + self.item.length

    def runs(self) -> list[tuple[int, int]]:
        """Return neighbouring placeholders, as [start, stop): parts of an image that attend to each other."""
        cuts = np.flatnonzero(np.diff(self.places) > 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(self.places, cuts)]


@dataclass(frozen=True, slots=True)
class _Row:
    images: list[Image]
    num_prompt_tokens: int
    axes: np.ndarray | None  # [3, num_prompt_tokens] int64: positions of the prompt, if they have three axes
    shift: int  # the position of a later token is its index plus this


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part of an image in a step: its placeholders `first` .. `last` - 1, at the indices `rows` of the step."""

    i: int  # batch position of the request
    image: Image
    first: int
    last: int
    rows: np.ndarray


class ImageRows:
    """A `RowState`: the rows whose prompts have images."""

    def __init__(self, vision: VisionSpec) -> None:
        self.vision = vision
        self._rows: dict[int, _Row] = {}

    def add(self, row: int, new: NewRequest) -> None:
        if not new.media:
            return
        prompt = np.asarray(new.token_ids[: new.num_prompt_tokens], np.int64)
        images = [_image(number, item, prompt, self.vision) for number, item in enumerate(new.media, 1)]
        axes, shift = _axes(images, len(prompt)) if self.vision.mrope else (None, 0)
        self._rows[row] = _Row(images, len(prompt), axes, shift)

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    def overlaps(self, step: StepInput) -> Iterator[Overlap]:
        """Yield the images whose spans overlap the chunks of a step, in the order of its tokens."""
        start = 0
        for i, (row, computed, scheduled) in enumerate(zip(step.rows, step.num_computed, step.num_scheduled)):
            if (mine := self._rows.get(row)) is not None and computed < mine.num_prompt_tokens:
                end = computed + scheduled
                for image in mine.images:
                    if image.item.offset < end and image.end > computed:
                        first, last = np.searchsorted(image.places, (computed, end)).tolist()
                        yield Overlap(i, image, first, last, image.places[first:last] - computed + start)
            start += scheduled

    def positions(self, step: StepInput) -> np.ndarray | None:
        """Return the positions of a step's tokens on three axes, int64 `[3, T]`, or `[T]` if they agree; None if they
        are the tokens' indices.
        """
        if not self.vision.mrope or self._rows.keys().isdisjoint(step.rows):
            return None
        counts = np.asarray(step.num_scheduled, np.int64)
        starts = counts.cumsum() - counts
        indices = np.arange(counts.sum()) + np.repeat(np.asarray(step.num_computed, np.int64) - starts, counts)
        positions = np.stack([indices] * 3)
        for i, row in enumerate(step.rows):
            if (mine := self._rows.get(row)) is None:
                continue
            computed, start = step.num_computed[i], int(starts[i])
            positions[:, start : start + step.num_scheduled[i]] += mine.shift
            inside = mine.axes[:, computed : computed + step.num_scheduled[i]]
            positions[:, start : start + inside.shape[1]] = inside
        return positions[0] if (positions == positions[0]).all() else positions


def _image(number: int, item: MediaItem, prompt: np.ndarray, vision: VisionSpec) -> Image:
    span = prompt[item.offset : item.offset + item.length]
    places = item.offset + np.flatnonzero(np.isin(span, vision.placeholders))
    if len(places) != item.num_embeds:
        raise ValueError(f"image {number} has {item.num_embeds} embeddings, but {len(places)} placeholders")
    if vision.mrope and len(places) != item.length:
        raise ValueError(f"image {number} has other tokens between its placeholders")
    return Image(number, item, places)


def _axes(images: list[Image], num_tokens: int) -> tuple[np.ndarray, int]:
    """Return (positions of a prompt's tokens, time, row and column, `[3, num_tokens]`; the shift of later tokens).
    Those of an image start at the next position, and the text after it one beyond the largest; frames with a `time`
    start with the first frame of their video.

    E.g. a, an image of 1 x 2 x 3, b: 0 1 1 1 1 1 1 4, 0 1 1 1 2 2 2 4, 0 1 2 3 1 2 3 4, and -4.
    """
    axes = np.empty((3, num_tokens), np.int64)
    index = position = start = 0
    for image in images:
        offset, time = image.item.offset, image.item.time
        if time is None:
            axes[:, index:offset] = position + np.arange(offset - index)
            position = start = position + offset - index
        places = start + np.indices(image.item.grid).reshape(3, -1)
        places[0] += time or 0
        axes[:, offset : image.end] = places
        index, position = image.end, max(position, int(places.max()) + 1)
    axes[:, index:] = position + np.arange(num_tokens - index)
    return axes, position - index
