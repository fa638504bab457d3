"""Detection of a separate output head in checkpoints whose configuration ties it to the embedding. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from quire.checkpoints.safetensors import read_header, stored_files

_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|backbone\.embeddings)\.weight$")
_PIECE = 1 << 24  # bytes compared at a time


def has_own_head(folder: str) -> bool:
    """Return whether the safetensors files of `folder` hold an output head that differs from the embedding. Then that
    head is used, as in transformers. Compares the files' bytes up to the first difference.
    """
    found: dict[re.Pattern[str], tuple[Path, int, int]] = {}
    for path in stored_files(Path(folder)):
        for name, tensor in read_header(path).items():
            for pattern in (_HEAD, _EMBEDDING):
                if pattern.search(name):
                    found.setdefault(pattern, (path, tensor.start, tensor.end))
    return len(found) == 2 and not _equal(found[_HEAD], found[_EMBEDDING])


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
