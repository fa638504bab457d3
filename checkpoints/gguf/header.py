"""Reads the header of a GGUF file (versions 2 and 3): its metadata and the positions of its tensors. Torch-free.

Layout: "GGUF", version, counts, metadata as (key, type, value), tensors as (name, dimensions from the last one on,
type, offset), then the data, aligned to `general.alignment`. Numbers are little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.reading import KeptReads

MAGIC = b"GGUF"
# ggml type -> (name, values per block, bytes per block)
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}
_OTHER_TYPES = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file. `shape` is in torch's order; `start` is the position of its bytes in the file."""

    shape: tuple[int, ...]
    type: str  # a name of TYPES
    path: Path
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file, or of all shards of a sharded file."""

    path: Path
    metadata: KeptReads
    tensors: dict[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Return whether the file begins as GGUF files do, whatever its name (Ollama's have none)."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def stored_path(path: Path) -> str:
    """Return the path by which a folder made from a file names the file. For a shard it is the link in the Hub's cache,
    whose name leads to the other shards; for any other file, the file itself.
    """
    return str(path.absolute() if _SHARD.search(path.name) else path.resolve())


def read_gguf(path: str | Path, *, arrays: bool = True) -> GgufFile:
    """Read the header of `path` and, if it is a shard (`-00001-of-00003.gguf`), of all others. Without `arrays` the
    metadata has none, such as the vocabulary, which takes most of the time.

    Raises:
        ValueError: a file is missing, damaged, or has tensors of an unsupported type.
    """
    path = Path(path)
    if not (match := _SHARD.search(path.name)):
        return _read(path, arrays)
    count = int(match[2])
    names = [_SHARD.sub(f"-{i:05}-of-{count:05}.gguf", path.name) for i in range(1, count + 1)]
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise ValueError(f"{path} is one of {count} shards; missing in its folder: {', '.join(missing)}")
    shards = [_read(path.with_name(name), arrays) for name in names]
    tensors: dict[str, GgufTensor] = {}
    for shard in shards:
        if twice := sorted(tensors.keys() & shard.tensors.keys()):
            raise ValueError(f"the tensor {twice[0]} is in {shard.path} and in {tensors[twice[0]].path}")
        tensors |= shard.tensors
    return GgufFile(shards[0].path, shards[0].metadata, tensors)


def _read(path: Path, arrays: bool) -> GgufFile:
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data, arrays).read()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is incomplete or damaged: download it again") from error


def header_length(data: bytes) -> int | None:
    """Return the length of the header of the file that begins with `data`, or None if `data` is too short to tell.

    Raises:
        ValueError: it is not a GGUF file that can be read.
    """
    header = _Header(Path("the file"), data)
    try:
        header.entries()
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
        return None
    return header.at


class _Header:
    def __init__(self, path: Path, data: mmap.mmap | bytes, arrays: bool = True):
        self.path, self.data, self.at, self.arrays = path, data, 0, arrays

    def read(self) -> GgufFile:
        metadata, infos = self.entries()
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error("an alignment that is none")
        begin = -(-self.at // alignment) * alignment
        tensors = {name: self._placed(name, begin, *info) for name, *info in infos}
        if len(tensors) < len(infos):
            raise ValueError(f"{self.path} has two tensors of one name")
        return GgufFile(self.path, KeptReads(metadata), tensors)

    def entries(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Return the metadata, and (name, shape, type, offset) of the tensors."""
        if self.data[:4] != MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file")
        self.at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} has GGUF version {version}; supported: 2, 3 (little-endian)")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_entries):
            key = self._text()
            if key in metadata:
                raise ValueError(f"{self.path} has the key {key} twice")
            metadata[key] = self._value(self._number("I"))
            if metadata[key] is None:
                del metadata[key]
        return metadata, [self._tensor() for _ in range(num_tensors)]

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        if self.at + length > len(self.data):
            raise struct.error("a text ends after the file")
        text = self.data[self.at : self.at + length].decode("utf-8", "surrogateescape")
        self.at += length
        return text

    def _texts(self, count: int) -> list[str]:
        """Read `count` texts. Vocabularies have up to a million, so calls per text are avoided."""
        data, at, size, length_at = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        if count > size:
            raise struct.error("an array ends after the file")
        texts = []
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > size:
                raise struct.error("a text ends after the file")
            texts.append(data[begin:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return texts

    def _skip_texts(self, count: int) -> None:
        at, length_at = self.at, struct.Struct("<Q").unpack_from
        with memoryview(self.data) as data:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
        self._skip_to(at)

    def _skip_to(self, at: int) -> None:
        if at > len(self.data):
            raise struct.error("an array ends after the file")
        self.at = at

    def _value(self, kind: int) -> Any:
        """Return a value, None for an array that is skipped."""
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error("unknown type of value")
        kind, count = self._number("I"), self._number("Q")
        if kind not in _SCALARS:
            if kind != _STRING:
                raise struct.error("an array of arrays")
            return self._texts(count) if self.arrays else self._skip_texts(count)
        begin, format = self.at, f"<{count}{_SCALARS[kind]}"
        self._skip_to(begin + struct.calcsize(format))
        return list(struct.unpack_from(format, self.data, begin)) if self.arrays else None

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._number("I")
        if num_dims > 8:
            raise struct.error("too many dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(self, name: str, begin: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TYPES:
            raise ValueError(
                f"{self.path}: {name} has the type {_OTHER_TYPES.get(kind, kind)}, which is not supported; supported: "
                f"{', '.join(sorted(BLOCKS))}. Give the model in another quantization, e.g. Q4_K_M"
            )
        type_name, values, size = TYPES[kind]
        count = 1
        for length in shape:
            count *= length
        num_bytes = count // values * size
        if not shape or shape[-1] % values or begin + offset + num_bytes > len(self.data):
            raise ValueError(f"{self.path} is incomplete or damaged at {name}: download it again")
        return GgufTensor(shape, type_name, self.path, begin + offset, num_bytes)
