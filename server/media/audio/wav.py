"""WAV files of the usual kinds, read without a library: PCM of 8 to 32 bits, float, A-law and mu-law."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)  # written by programs that stream a file
BLOCK = 1 << 16  # frames


class WavFile:
    """`num_frames` follows from the header and the size of the file. Raises ValueError for a damaged header."""

    def __init__(self, file: BinaryIO, num_bytes: int):
        self._file = file
        file.seek(12)
        self.rate = 0
        while True:
            head = file.read(8)
            if len(head) < 8:
                raise ValueError("it has no samples" if self.rate else "its header is damaged")
            name, size = head[:4], struct.unpack("<I", head[4:])[0]
            start = file.tell()
            if name == b"fmt ":
                self._read_format(file.read(min(size, 40)))
            elif name == b"data":
                break
            file.seek(start + size + size % 2)
        if not self.rate:
            raise ValueError("its header is damaged")
        left = num_bytes - start
        self._num_bytes = left if size in _UNKNOWN_SIZES else min(size, left)
        self.num_frames = self._num_bytes // (self._width * self.num_channels)

    def _read_format(self, data: bytes) -> None:
        if len(data) < 16:
            raise ValueError("its header is damaged")
        kind, self.num_channels, self.rate, _, _, bits = struct.unpack("<HHIIHH", data[:16])
        if kind == _EXTENSIBLE and len(data) >= 26:
            kind = struct.unpack("<H", data[24:26])[0]
        self._width, self._kind = bits // 8, kind
        known = (_PCM, (8, 16, 24, 32)), (_FLOAT, (32, 64)), (_ALAW, (8,)), (_MULAW, (8,))
        if not any(kind == one and bits in sizes for one, sizes in known):
            raise ValueError(f"WAV files of format {kind} with {bits} bits are not supported")
        if not 1 <= self.num_channels <= 64 or not self.rate:
            raise ValueError("its header is damaged")

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the samples of all channels, float32 `[frames, channels]`."""
        frame, left = self._width * self.num_channels, self.num_frames
        while left:
            data = self._file.read(min(left, BLOCK) * frame)
            count = len(data) // frame
            if not count:
                return
            yield self._to_floats(data[: count * frame]).reshape(count, self.num_channels)
            left -= count

    def _to_floats(self, data: bytes) -> np.ndarray:
        match self._kind, self._width:
            case (1, 1):
                return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
            case (1, 3):
                parts = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
                whole = parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24
                return whole.astype(np.float32) / (1 << 31)
            case (1, width):
                return np.frombuffer(data, f"<i{width}").astype(np.float32) / (1 << (8 * width - 1))
            case (3, width):
                return np.nan_to_num(np.frombuffer(data, f"<f{width}").astype(np.float32))
            case (6, _):
                return _alaw(np.frombuffer(data, np.uint8))
        return _mulaw(np.frombuffer(data, np.uint8))


def _alaw(codes: np.ndarray) -> np.ndarray:
    """Return the samples of A-law codes (ITU-T G.711)."""
    codes = codes.astype(np.int32) ^ 0x55
    exponent, mantissa = codes >> 4 & 7, (codes & 15) << 4
    size = np.where(exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0))
    return np.where(codes & 0x80, size, -size).astype(np.float32) / (1 << 15)


def _mulaw(codes: np.ndarray) -> np.ndarray:
    """Return the samples of mu-law codes (ITU-T G.711)."""
    codes = ~codes.astype(np.int32) & 0xFF
    size = (((codes & 15) << 3) + 0x84 << (codes >> 4 & 7)) - 0x84
    return np.where(codes & 0x80, -size, size).astype(np.float32) / (1 << 15)
