"""Compares downloaded files with their SHA-256 on the Hub, by which the cache names large files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from quire.checkpoints.reading import read_object

_SHA256 = re.compile(r"[0-9a-f]{64}")
CHECKING = "checking SHA-256"
Progress = Callable[[str, float], None]


def check(folder: str, progress: Progress = lambda phase, fraction: None) -> int:
    """Check the files of a model folder that links to the Hub's cache. Returns the number of files with a SHA-256.

    Raises ValueError and removes the file if one differs.
    """
    blobs = {path.resolve() for path in _weights(Path(folder))}
    checked = sorted(blob for blob in blobs if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name))
    total, done = sum(blob.stat().st_size for blob in checked) or 1, 0
    for blob in checked:
        progress(CHECKING, done / total)
        with blob.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        done += blob.stat().st_size
        if found != blob.name:
            raise ValueError(
                f"model: {_remove(blob)} was damaged on its way (SHA-256 is {found}, expected {blob.name}) and is "
                "removed: download it again"
            )
    return len(checked)


def _remove(blob: Path) -> str:
    """Remove a blob and the links to it. Returns their name."""
    links = [link for link in (blob.parent.parent / "snapshots").rglob("*") if link.resolve() == blob]
    for link in (*links, blob):
        link.unlink()
    return links[0].name if links else blob.name


def _weights(folder: Path) -> list[Path]:
    """Return the files of a folder, or the GGUF file and its shards that a folder made from it names."""
    settings = read_object(folder / "config.json").get("quantization_config") or {}
    if settings.get("quant_method") == "gguf" and isinstance(settings.get("file"), str):
        file = Path(settings["file"])
        stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", file.name)
        return [file] if stem == file.name else sorted(file.parent.glob(f"{stem}-*-of-*.gguf"))
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
