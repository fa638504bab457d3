"""Log-mel features, as Whisper's encoder reads them: equal to those of transformers' WhisperFeatureExtractor."""

from __future__ import annotations

from functools import cache

import numpy as np

RATE = 16_000  # samples per second
WINDOW, HOP = 400, 160  # samples
_LOWEST, _RANGE = 1e-10, 8.0  # power, and powers of ten below the loudest entry that are kept
_LINEAR_HZ, _LINEAR_STEP, _LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27  # Slaney's mel scale


def log_mel(samples: np.ndarray, num_mels: int, num_frames: int, *, with_rest: bool = False) -> np.ndarray:
    """Return the features `[num_mels, num_frames]`, float32, of float32 samples, padded with silence or cut to
    `num_frames` times `HOP`. With `with_rest`, the last frame covers up to `HOP` - 1 more samples.
    """
    length = num_frames * HOP
    samples = samples[: length + (HOP - 1 if with_rest else 0)]
    padded = np.pad(samples.astype(np.float64), (0, max(0, length - len(samples))))
    padded = np.pad(padded, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
    found = np.log10(np.maximum(_filters(num_mels) @ power.T, _LOWEST))
    found = np.maximum(found, found.max() - _RANGE)
    return np.ascontiguousarray((found + 4.0) / 4.0, np.float32)


@cache
def _filters(num_mels: int) -> np.ndarray:
    """Return triangles over the frequencies, `[num_mels, WINDOW // 2 + 1]`, each of area 1, from 0 Hz to 8 kHz."""
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    corners = _to_hertz(np.linspace(_to_mel(0.0), _to_mel(RATE / 2), num_mels + 2))
    low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz / _LINEAR_STEP
    return _LINEAR_HZ / _LINEAR_STEP + np.log(hertz / _LINEAR_HZ) / _LOG_STEP


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    first = _LINEAR_HZ / _LINEAR_STEP
    return np.where(mels < first, mels * _LINEAR_STEP, _LINEAR_HZ * np.exp(_LOG_STEP * (mels - first)))
