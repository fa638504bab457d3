"""Cuts audio of any length into windows of at most 30 seconds, at silences, while it is being decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.server.media.audio.features import RATE

FRAME = RATE // 50  # samples whose energy is measured together
LONGEST = 30 * RATE  # samples of a window
_EARLIEST = 20 * RATE  # of a cut without a silence
_SHORTEST = RATE  # of a window that ends at a silence
_INAUDIBLE = 3e-4  # root mean square of a frame, of full scale
_LOUD = 0.95  # quantile of the frames' energy that counts as the energy of speech
_OF_LOUD = 0.2  # with a threshold of 1, frames below this part of it are silence


@dataclass(frozen=True, slots=True)
class Cutting:
    """The search for silences, as in OpenAI's server_vad: a frame is silent below `threshold`, 0 to 1, a part of the
    loudness of speech. A cut leaves at least `padding` seconds of silence before the next window.
    """

    threshold: float = 0.5
    silence: float = 0.2  # seconds that a silence must last
    padding: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    start: float  # seconds from the beginning of the file
    samples: np.ndarray  # float32 at 16 kHz

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    @property
    def is_silent(self) -> bool:
        """Return whether the window is inaudible."""
        return not len(self.samples) or bool(loudness(self.samples).max() < _INAUDIBLE)


def windows(blocks: Iterator[np.ndarray], cutting: Cutting, most_seconds: float) -> Iterator[Window]:
    """Yield the windows of all samples, one after another without gaps. Raises ValueError after `most_seconds`."""
    parts, size, start = [], 0, 0
    for block in blocks:
        if start + size + len(block) > most_seconds * RATE:
            raise ValueError(f"it is longer than {most_seconds:g} seconds, the most that this server transcribes")
        parts.append(block)
        size += len(block)
        while size > LONGEST:
            joined = np.concatenate(parts)
            cut = find_cut(joined[:LONGEST], cutting)
            yield Window(start / RATE, joined[:cut].copy())
            parts, size, start = [joined[cut:]], size - cut, start + cut
    if size:
        yield Window(start / RATE, np.concatenate(parts))


def find_cut(samples: np.ndarray, cutting: Cutting) -> int:
    """Return the sample at which to cut: the middle of the last silence, or the least energy."""
    energy = loudness(samples)
    threshold = max(cutting.threshold * _OF_LOUD * float(np.quantile(energy, _LOUD)), _INAUDIBLE)
    if energy.max() < threshold:
        return len(samples)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], energy < threshold, [0]]).astype(np.int8)))
    need = max(round(cutting.silence * RATE / FRAME), 1)
    for first, last in reversed(edges.reshape(-1, 2).tolist()):
        # a silence at the window's end may continue, and words may follow a short one
        middle = max(last * FRAME - max(round(cutting.padding * RATE), (last - first) * FRAME // 2), first * FRAME)
        if last - first >= need and middle >= _SHORTEST:
            return middle
    width = 10  # frames, over which energy is summed
    summed = np.convolve(energy**2, np.ones(width), "valid")
    earliest = _EARLIEST // FRAME
    return (earliest + int(summed[earliest:].argmin()) + width // 2) * FRAME


def loudness(samples: np.ndarray) -> np.ndarray:
    """Return the root mean square of each frame."""
    padded = np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME)
    return np.sqrt(np.square(padded, dtype=np.float64).mean(1))
