"""The features of audio are those of transformers' WhisperFeatureExtractor, and resampling keeps tones."""

from __future__ import annotations

import numpy as np
import pytest

from quire.server.media.audio.features import RATE, log_mel
from quire.server.media.audio.resample import Resampler
from tests.helpers.models.speech_models import sound


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.7, 30.0, 31.0])
def test_equal_to_transformers(num_mels, seconds):
    from transformers import WhisperFeatureExtractor

    samples = sound(1, seconds)
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    reference = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    found = log_mel(samples, num_mels, 3000)
    assert found.dtype == np.float32 and found.shape == reference.shape
    np.testing.assert_allclose(found, reference, atol=1e-4)


def resampled(samples: np.ndarray, rate: int, block: int) -> np.ndarray:
    resampler = Resampler(rate, RATE)
    blocks = [resampler.push(samples[i : i + block]) for i in range(0, len(samples), block)]
    return np.concatenate([*blocks, resampler.push(np.zeros(0, np.float32), last=True)])


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_tones_at_other_rates(rate):
    def tones(at: int) -> np.ndarray:
        time = np.arange(2 * at) / at
        return (np.sin(2 * np.pi * 440 * time) + 0.3 * np.sin(2 * np.pi * 3000 * time)).astype(np.float32)

    found = resampled(tones(rate), rate, 7777)
    assert len(found) == 2 * RATE
    np.testing.assert_allclose(found[200:-200], tones(RATE)[200:-200], atol=1e-3)
    np.testing.assert_array_equal(found, resampled(tones(rate), rate, 1 << 20))


def test_tones_above_the_new_limit_are_removed():
    time = np.arange(48_000) / 48_000
    found = resampled(np.sin(2 * np.pi * 12_000 * time).astype(np.float32), 48_000, 5000)
    assert np.abs(found[200:-200]).max() < 1e-3
