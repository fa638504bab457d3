"""The headers of safetensors files, and the index that maps tensors to files. Torch-free.

A file begins with the length of its header (8 bytes) and the header: a JSON object with, for each tensor, its type, its
shape and the offsets of its bytes after the header.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from quire.checkpoints.files import damaged_weights
from quire.checkpoints.reading import read_object

logger = logging.getLogger("quire.checkpoints")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST = 100_000_000  # bytes of a header, as in the library


class StoredTensor(NamedTuple):
    """A tensor in a file: its bytes are those from position `start` to `end`."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises ValueError if it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST, size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        header.pop("__metadata__", None)
        return {name: _tensor(name, entry, 8 + length, size) for name, entry in header.items()}
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise ValueError(damaged_weights(path, error)) from error


def _tensor(name: str, entry: Any, begin: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            if all(type(n) is int and n >= 0 for n in shape) and 0 <= start <= end <= size - begin:
                return StoredTensor(dtype, shape, begin + start, begin + end)
    raise ValueError(f"the header's entry of the tensor {name!r} is wrong")


def read_index(folder: Path) -> Mapping[str, str] | None:
    """Return the file of each tensor by the folder's index; None without an index.

    Raises ValueError for an index that is damaged, or that names a file outside the folder.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    names = read_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(
            f"cannot read {path}: it must be a JSON object with a weight_map of file names; download it again"
        )
    for name in set(names.values()):
        if not _is_inside(name):
            raise ValueError(f"{path}: weight_map names {name!r}, which is not a file inside the folder")
    return names


def _is_inside(name: str) -> bool:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    parts = {*posix.parts, *windows.parts}
    return bool(parts) and ".." not in parts and not posix.is_absolute() and not windows.anchor and "\0" not in name


def weight_names(folder: Path) -> list[str] | None:
    """Return the names of the files with the model's weights, None if there is neither an index nor a single file. A
    single file is preferred, as transformers does. Raises ValueError as `read_index` does.
    """
    index = read_index(folder)
    single = (folder / SINGLE).is_file()
    if index is None:
        return [SINGLE] if single else None
    names = sorted(set(index.values()))
    if single and names != [SINGLE]:
        logger.warning(
            "%s has both %s and %s, which names %s: reading %s, as transformers does; remove the other",
            folder, SINGLE, INDEX, ", ".join(names[:3]), SINGLE,
        )  # fmt: skip
        return [SINGLE]
    return names


def stored_files(folder: Path) -> list[Path]:
    """Return the files of weights that exist in the folder."""
    names = weight_names(folder)
    return sorted(folder.glob("*.safetensors")) if names is None else [p for n in names if (p := folder / n).is_file()]
