"""An upload in any container -> mono samples at 16 kHz, in blocks: WAV by ourselves, other files by the libraries of
the extra `audio`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from quire.server.media.audio.features import RATE
from quire.server.media.audio.resample import Resampler
from quire.server.media.audio.wav import WavFile

if TYPE_CHECKING:
    import av.container

_BLOCK = 1 << 16  # frames
_RATES = range(4000, 384_001)
FORMATS = "wav, mp3, flac, ogg, m4a, mp4, mpeg, mpga and webm"


@dataclass(frozen=True, slots=True)
class Audio:
    """`seconds` is the length in the header, if any. `blocks` are float32 samples at 16 kHz; iterating raises
    ValueError at a damaged part.
    """

    seconds: float | None
    blocks: Iterator[np.ndarray]


def open_audio(file: BinaryIO, num_bytes: int) -> Audio:
    """Read the header of a file. Raises ValueError, as the end of a sentence, if it is no audio,
    ModuleNotFoundError if a library is missing.
    """
    if not num_bytes:
        raise ValueError("it is empty")
    file.seek(0)
    head = file.read(64)
    file.seek(0)
    kind = container_of(head)
    if kind == "wav":
        wav = WavFile(file, num_bytes)
        return _resampled(wav.blocks(), wav.rate, wav.num_frames)
    if kind == "soundfile":
        return _by_soundfile(file)
    if kind == "av":
        return _by_av(file)
    raise ValueError(f"its container is not known; supported are {FORMATS}")


def container_of(head: bytes) -> str | None:
    """Return the reader of a file that begins with `head`: wav, soundfile or av; None for an unknown container."""
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        return "wav" if head[:4] == b"RIFF" else "soundfile"
    if head[:4] in (b"fLaC", b"OggS", b"FORM", b".snd", b"caff") or head[:3] == b"ID3":
        return "soundfile"
    if head[4:8] == b"ftyp" or head[:4] in (b"\x1a\x45\xdf\xa3", b"\x00\x00\x01\xba"):  # mp4, webm, mpeg
        return "av"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # the frame of MPEG audio; layer 0 is AAC
        return "soundfile" if head[1] & 0x06 else "av"
    return None


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"this server reads WAV only: it lacks the package {package} (pip install 'quire[audio]')"
        )


def _by_soundfile(file: BinaryIO) -> Audio:
    _require("soundfile")
    import soundfile

    try:
        sound = soundfile.SoundFile(file)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise ValueError(f"it is damaged: {error}") from None

    def blocks() -> Iterator[np.ndarray]:
        with sound:
            while True:
                try:
                    block = sound.read(_BLOCK, dtype="float32", always_2d=True)
                except (soundfile.SoundFileError, RuntimeError) as error:
                    raise ValueError(f"it is damaged: {error}") from None
                if not len(block):
                    return
                yield block

    # for files without a frame count, the library reports the largest number
    known = 0 <= sound.frames < 1 << 62
    return _resampled(blocks(), sound.samplerate, sound.frames if known else None)


def _by_av(file: BinaryIO) -> Audio:
    _require("av")
    import av

    with _av_errors():
        container = av.open(file, mode="r", metadata_errors="ignore")
        stream = next(iter(container.streams.audio), None)
    if stream is None:
        container.close()
        raise ValueError("it has no audio stream")
    seconds = None
    if container.duration:
        seconds = container.duration / 1_000_000
    return Audio(seconds, _av_blocks(container, stream))


def _av_blocks(container: av.container.InputContainer, stream: object) -> Iterator[np.ndarray]:
    import av

    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with container:
        with _av_errors():
            frames = container.decode(stream)
        while True:
            with _av_errors():
                frame = next(frames, None)
                made = resampler.resample(frame)
            for one in made:
                yield one.to_ndarray().reshape(-1)
            if frame is None:
                return


@contextmanager
def _av_errors() -> Iterator[None]:
    import av.error

    try:
        yield
    except av.error.FFmpegError as error:
        raise ValueError(f"it is damaged: {error.strerror}") from None


def _resampled(blocks: Iterator[np.ndarray], rate: int, num_frames: int | None) -> Audio:
    if rate not in _RATES:
        raise ValueError(f"its sample rate of {rate} Hz is not supported: {_RATES.start} to {_RATES.stop - 1} are")

    def mono() -> Iterator[np.ndarray]:
        resampler = Resampler(rate, RATE)
        for block in blocks:
            yield resampler.push(block.mean(1, dtype=np.float32))
        yield resampler.push(np.zeros(0, np.float32), last=True)

    return Audio(None if num_frames is None else num_frames / rate, mono())
