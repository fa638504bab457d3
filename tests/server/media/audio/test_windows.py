"""Audio is cut into windows of at most 30 seconds without gaps, at silences where there are any."""

from __future__ import annotations

import numpy as np
import pytest

from quire.server.media.audio.features import RATE
from quire.server.media.audio.windows import Cutting, find_cut, windows
from tests.helpers.models.speech_models import sound


def blocks(samples: np.ndarray, size: int = 50_000):
    return (samples[i : i + size] for i in range(0, len(samples), size))


def speech(*parts: float) -> np.ndarray:
    """Seconds of sound and of silence in turn."""
    return np.concatenate(
        [
            sound(i, seconds) if i % 2 == 0 else np.zeros(int(seconds * RATE), np.float32)
            for i, seconds in enumerate(parts)
        ]
    )


def cut(samples: np.ndarray, size: int = 50_000):
    return list(windows(blocks(samples, size), Cutting(), 3600))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, 123_457, 10_000_000])
def test_nothing_is_lost(size):
    samples = sound(1, 97.3)
    found = cut(samples, size)
    np.testing.assert_array_equal(np.concatenate([one.samples for one in found]), samples)
    starts = [one.start for one in found]
    ends = [one.start + one.seconds for one in found]
    assert starts[0] == 0.0 and starts[1:] == pytest.approx(ends[:-1]) and ends[-1] == pytest.approx(97.3)
    assert all(one.seconds <= 30 for one in found)


def test_short_audio_is_one_window():
    assert [one.seconds for one in cut(sound(1, 30.0))] == [30.0]
    assert cut(np.zeros(0, np.float32)) == []


def test_cut_in_the_last_silence():
    found = cut(speech(10.0, 0.6, 12.0, 0.6, 20.0, 0.6, 5.0))
    assert [round(one.start, 1) for one in found] == [0.0, 22.9]


def test_a_silence_that_is_too_short_is_none():
    samples = speech(10.0, 0.6, 15.0, 0.1, 10.0)
    assert find_cut(samples[: 30 * RATE], Cutting()) == pytest.approx(10.3 * RATE, abs=400)
    assert find_cut(samples[: 30 * RATE], Cutting(silence=0.08)) == pytest.approx(25.65 * RATE, abs=400)


def test_quiet_sound_counts_as_silence_by_the_threshold():
    samples = speech(12.0, 1.0, 20.0)
    samples[12 * RATE : 13 * RATE] = sound(9, 1.0) * 0.05
    assert find_cut(samples[: 30 * RATE], Cutting(threshold=0.5)) == pytest.approx(12.5 * RATE, abs=400)
    assert find_cut(samples[: 30 * RATE], Cutting(threshold=0.1)) >= 20 * RATE


def test_without_silence_the_least_energy_is_cut():
    samples = sound(1, 40.0)
    samples[int(24.8 * RATE) : int(25.2 * RATE)] *= 0.4
    assert find_cut(samples[: 30 * RATE], Cutting()) == pytest.approx(25 * RATE, abs=0.2 * RATE)


def test_silence_is_known():
    first, second = cut(speech(0.0, 30.0, 30.0))[:2]
    assert first.is_silent and not second.is_silent


def test_too_long():
    with pytest.raises(ValueError, match="longer than 60 seconds"):
        list(windows(blocks(sound(1, 61)), Cutting(), 60))
