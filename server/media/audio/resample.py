"""Changes the sample rate of audio that comes in blocks: a low-pass filter (a windowed sinc), evaluated at the times of
the new samples only.
"""

from __future__ import annotations

from math import ceil, gcd

import numpy as np

_ZEROS = 16  # zero crossings of the filter to each side
_BETA = 8.6  # of its Kaiser window
_ROLL_OFF = 0.945  # of the lower of the two Nyquist frequencies
_PIECE = 1 << 13  # outputs computed at once
_STEP = 25  # Hz: other rates, not used in practice, are rounded, as they would need too many filters


class Resampler:
    """Maps blocks of float32 samples at `rate` to blocks at `target`. The sequence of blocks has no seams."""

    def __init__(self, rate: int, target: int):
        rate = max(round(rate / _STEP), 1) * _STEP
        common = gcd(rate, target)
        self._up, self._down = target // common, rate // common
        self._cutoff = _ROLL_OFF * min(1.0, target / rate)  # in units of the input's Nyquist frequency
        self._half = ceil(_ZEROS / self._cutoff)
        self._kept = np.zeros(self._half, np.float32)  # the input from index `_first` on
        self._first = -self._half
        self._next = 0  # index of the next output
        self._taps = self._filters() if self._up != self._down else None

    def push(self, block: np.ndarray, last: bool = False) -> np.ndarray:
        """Return the new samples that the input up to this block determines; with `last`, all."""
        if self._up == self._down:
            return block
        tail = np.zeros(self._half if last else 0, np.float32)
        self._kept = np.concatenate([self._kept, block, tail])
        end = self._first + len(self._kept)  # of the known input
        # output n is at input n * down / up, and needs `half` samples to each side
        stop = max(((end - self._half) * self._up - 1) // self._down + 1, self._next)
        out = np.empty(stop - self._next, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._kept, 2 * self._half)
        for first in range(self._next, stop, _PIECE):
            number = np.arange(first, min(first + _PIECE, stop))
            places, phases = np.divmod(number * self._down, self._up)
            found = windows[places - self._half + 1 - self._first]
            out[number - self._next] = np.einsum("ij,ij->i", found, self._taps[phases])
        self._next = stop
        unused = stop * self._down // self._up - self._half + 1 - self._first
        if unused > 0:
            self._kept = self._kept[unused:]
            self._first += unused
        return out

    def _filters(self) -> np.ndarray:
        """Return `[up, 2 * half]` weights of the inputs around an output, for each of the places between two inputs."""
        places = np.arange(self._up)[:, None] / self._up
        distance = np.arange(-self._half + 1, self._half + 1) - places
        shape = np.i0(_BETA * np.sqrt(np.maximum(1 - (distance / self._half) ** 2, 0.0))) / np.i0(_BETA)
        return (self._cutoff * np.sinc(self._cutoff * distance) * shape).astype(np.float32)
