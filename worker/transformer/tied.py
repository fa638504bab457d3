"""Whether a checkpoint whose configuration ties the output head to the embedding holds another head. Torch-free."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

from quire.checkpoints.files import damaged_weights

_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte)\.weight$")
_PIECE = 1 << 24  # bytes compared at a time


def has_own_head(folder: str) -> bool:
    """Return whether the safetensors files of `folder` hold an output head that differs from the embedding. Then it is
    used, as transformers does. Compares the files' bytes up to the first difference.
    """
    found: dict[re.Pattern[str], tuple[Path, int, int]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            for name, start, end in _tensors(path):
                for pattern in (_HEAD, _EMBEDDING):
                    if pattern.search(name):
                        found.setdefault(pattern, (path, start, end))
        except (OSError, struct.error, ValueError, KeyError) as error:
            raise ValueError(damaged_weights(path, error)) from error
    return len(found) == 2 and not _equal(found[_HEAD], found[_EMBEDDING])


def _tensors(path: Path) -> list[tuple[str, int, int]]:
    """(name, start, end) of each tensor in a file, in bytes from its beginning."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, path.stat().st_size)))
    header.pop("__metadata__", None)
    return [(name, *(8 + length + offset for offset in entry["data_offsets"])) for name, entry in header.items()]


def _equal(one: tuple[Path, int, int], other: tuple[Path, int, int]) -> bool:
    (path, start, end), (other_path, other_start, other_end) = one, other
    if end - start != other_end - other_start:
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(start)
        other_file.seek(other_start)
        for at in range(0, end - start, _PIECE):
            size = min(_PIECE, end - start - at)
            if file.read(size) != other_file.read(size):
                return False
    return True
