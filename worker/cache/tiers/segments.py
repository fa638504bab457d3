"""Files of the disk tier: some MiB of blocks with checksums.

    8 bytes    magic, with the version of the format
    4 + 4      length and crc32 of the header
    header     msgpack: the fingerprint of the engine that wrote it, and (key, size, crc32) of each block
    blocks     one after the other

A file is complete once it has its name: it is written under another one and renamed. Nothing is trusted when it is
read: a file that is torn, changed or not ours raises ValueError, as does a block with another checksum.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

MAGIC = b"QUIREKV1"
_PREFIX = len(MAGIC) + 8
MAX_HEADER = 16 << 20  # bytes: a longer one is not ours


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a block."""

    path: Path
    offset: int
    size: int
    crc: int


def encode(fingerprint: bytes, blocks: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the parts of a file with these (key, content) blocks."""
    entries = [(key, len(content), crc32(content)) for key, content in blocks]
    header = msgspec.msgpack.encode((fingerprint, entries))
    prefix = MAGIC + len(header).to_bytes(4, "little") + crc32(header).to_bytes(4, "little")
    return [prefix + header, *(content for _, content in blocks)]


def _open(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file: a link may lead elsewhere, a pipe would wait for a writer. Raises OSError, ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("no regular file")
    return open(descriptor, "rb", buffering=buffering)


def read_places(path: Path, fingerprint: bytes) -> dict[bytes, Place]:
    """Return the blocks of a file by key. Raises OSError, or ValueError if the file is not a complete one of this
    engine.
    """
    with _open(path) as file:
        if not (prefix := file.read(_PREFIX)):
            raise ValueError("it is empty")
        if len(prefix) < _PREFIX or not prefix.startswith(MAGIC):
            raise ValueError("it is not a file of this format")
        length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 4], "little")
        header = file.read(length) if length <= MAX_HEADER else b""
        if len(header) != length or crc32(header) != int.from_bytes(prefix[-4:], "little"):
            raise ValueError("its header is damaged")
        size = os.fstat(file.fileno()).st_size
    try:
        owner, entries = msgspec.msgpack.decode(header, type=tuple[bytes, list[tuple[bytes, int, int]]])
    except msgspec.DecodeError:
        raise ValueError("its header is damaged") from None
    if owner != fingerprint:
        raise ValueError("it belongs to another model or format")
    places, offset = {}, _PREFIX + length
    for key, count, crc in entries:
        places[key] = Place(path, offset, count, crc)
        offset += count
    if offset != size:
        raise ValueError("it is torn: its size is not that of its blocks")
    return places


def read_block(place: Place) -> bytes:
    """Return the content of a block. Raises OSError, or ValueError if it was changed."""
    with _open(place.path, buffering=0) as file:
        file.seek(place.offset)
        content = bytearray()
        while len(content) < place.size and (part := file.read(place.size - len(content))):
            content += part
    if len(content) != place.size or crc32(content) != place.crc:
        raise ValueError("a block has another checksum")
    return bytes(content)
