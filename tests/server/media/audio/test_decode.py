"""Files of every kind become the same samples, and those that are damaged are refused."""

from __future__ import annotations

import io

import numpy as np
import pytest

from quire.server.media.audio import decode
from quire.server.media.audio.decode import open_audio
from tests.helpers.models.sounds import raw_wav, wav
from tests.helpers.models.speech_models import sound

SOUND = sound(2, 1.5)


def samples_of(data: bytes) -> np.ndarray:
    audio = open_audio(io.BytesIO(data), len(data))
    found = np.concatenate(list(audio.blocks))
    if audio.seconds is not None:
        assert abs(audio.seconds - len(found) / 16_000) < 0.05
    return found


def mu_law(samples: np.ndarray) -> bytes:
    """G.711, by the definition: the segment and the step of the biased magnitude."""
    out = bytearray()
    for value in (samples * 32768).astype(int).tolist():
        sign, size = (0x80, -value) if value < 0 else (0, value)
        size = min(size, 32635) + 0x84
        exponent = size.bit_length() - 8
        out.append(~(sign | exponent << 4 | size >> exponent + 3 & 15) & 0xFF)
    return bytes(out)


@pytest.mark.parametrize(
    ("kind", "bits", "data", "precision"),
    [
        (1, 8, ((SOUND * 127) + 128).astype(np.uint8).tobytes(), 2e-2),
        (1, 16, (SOUND * 32767).astype("<i2").tobytes(), 1e-4),
        (1, 24, (SOUND * 8388607).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), 1e-5),
        (1, 32, (SOUND * 2147483000).astype("<i4").tobytes(), 1e-5),
        (3, 32, SOUND.astype("<f4").tobytes(), 1e-6),
        (3, 64, SOUND.astype("<f8").tobytes(), 1e-6),
        (7, 8, mu_law(SOUND), 2e-2),
    ],
)
def test_formats_of_wav(kind, bits, data, precision):
    np.testing.assert_allclose(samples_of(raw_wav(data, kind, bits)), SOUND, atol=precision)


def test_channels_and_rates():
    np.testing.assert_allclose(samples_of(wav(SOUND, channels=2)), SOUND, atol=1e-4)
    assert len(samples_of(wav(SOUND, rate=8000))) == 2 * len(SOUND)


def test_a_stream_without_sizes():
    """A program that writes to a pipe does not know how long the file gets."""
    data = wav(SOUND)
    start = data.index(b"data") + 4
    for size in (b"\0\0\0\0", b"\xff\xff\xff\xff"):
        np.testing.assert_allclose(samples_of(data[:start] + size + data[start + 4 :]), SOUND, atol=1e-4)
    np.testing.assert_allclose(samples_of(data[:-10_001]), SOUND[: len(samples_of(data[:-10_001]))], atol=1e-4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"hello, this is text", "its container is not known"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "its header is damaged"),
        (wav(SOUND)[:30], "its header is damaged"),
        (wav(SOUND)[:36], "it has no samples"),
        (raw_wav(b"\0" * 100, 2, 4), "format 2 with 4 bits"),
        (raw_wav(b"\0" * 100, 1, 16, rate=10), "sample rate of 10 Hz"),
        (raw_wav(b"\0" * 100, 1, 16, channels=1000), "its header is damaged"),
    ],
)
def test_refused(data, message):
    with pytest.raises(ValueError, match=message):
        samples_of(data)


def test_without_the_libraries(monkeypatch):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    for data, package in ((b"fLaC" + bytes(60), "soundfile"), (b"\0\0\0\x18ftypM4A " + bytes(60), "av")):
        with pytest.raises(ModuleNotFoundError, match=rf"reads WAV only: it lacks the package {package}"):
            samples_of(data)


@pytest.mark.parametrize("form", ["flac", "ogg", "mp3"])
def test_by_soundfile(form):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, SOUND, 16_000, format=form)
    found = samples_of(file.getvalue())
    assert abs(len(found) - len(SOUND)) < 3000
    with pytest.raises(ValueError, match="it is damaged"):
        samples_of(file.getvalue()[:40])


@pytest.mark.parametrize(("form", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_by_av(form, codec):
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=48_000, layout="mono")
        samples = np.repeat(SOUND, 3)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
        frame.sample_rate = 48_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    found = samples_of(file.getvalue())
    assert abs(len(found) - len(SOUND)) < 3000
    with pytest.raises(ValueError, match="it is damaged"):
        samples_of(file.getvalue()[:100])


def test_a_film_without_sound():
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width = stream.height = 64
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    with pytest.raises(ValueError, match="it has no audio stream"):
        samples_of(file.getvalue())
