"""The inputs of cached values besides tokens: the model's weights, their type, the layout of a block."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 4096  # for each file of weights


def model_identity(folder: str) -> bytes:
    """Return a digest of a model's files: config.json, and of each file of weights its size, time and some of its
    content.

    Weights are too large to read in full at each start. A copied file has another time, so that its blocks are no hits:
    they are computed again, which is slower but correct.
    """
    digest = hashlib.sha256()
    for file in _weights(folder, digest):
        _add_file(digest, file)
    return digest.digest()


def model_content(folder: str) -> bytes:
    """Return a digest of all bytes of config.json and the files of weights, which is the same for copies on other
    machines.
    """
    digest = hashlib.sha256()
    for file in _weights(folder, digest):
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.digest()


def _weights(folder: str, digest: Any) -> list[Path]:
    """Return a model's files of weights; its config.json is added to `digest`."""
    path = Path(folder)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if (config := path / "config.json").is_file():
        text = config.read_bytes()
        digest.update(text)
        files += [Path(name) for name in _names(json.loads(text)) if name.endswith(".gguf")]
    return [file for file in files if file.is_file()]


def _names(value: Any) -> list[str]:
    """Return all texts of a config: one made from a GGUF file names the file."""
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for child in children for name in _names(child)]


def _add_file(digest: Any, file: Path) -> None:
    with file.open("rb") as weights:
        status = os.fstat(weights.fileno())
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        for i in range(SAMPLES):
            weights.seek(max(status.st_size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
            digest.update(weights.read(SAMPLE_BYTES))


def fingerprint(identity: bytes, facts: Sequence[Any]) -> bytes:
    """Return the digest of a model's identity and of facts about a rank's blocks, which have a definite repr."""
    return hashlib.sha256(identity + repr(tuple(facts)).encode()).digest()
