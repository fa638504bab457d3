"""Makes audio files in memory."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np


def wav(samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    """Return a WAV file in 16-bit PCM; the samples are float32 in -1 .. 1, the same in every channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat((samples * 32767).astype("<i2"), channels).tobytes())
    return file.getvalue()


def raw_wav(data: bytes, kind: int, bits: int, rate: int = 16_000, channels: int = 1) -> bytes:
    """Return a WAV file of any format, with a chunk of an odd length before the samples."""
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"LIST\x03\0\0\0abc\0"
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
