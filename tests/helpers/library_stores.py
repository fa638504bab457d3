"""Makes model stores of other programs in a folder of a test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

_VARIABLES = ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")


def isolated_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the user's home, and quire's cache in it, an empty folder; returns it."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("QUIRE_CACHE", str(folder / "quire"))
    return folder


def ollama_model(root: Path, name: str, weights: bytes, layers: dict[str, bytes] | None = None) -> Path:
    """Write a model HOST/ORG/NAME/TAG to Ollama's store in `root`; returns the file of its weights."""
    contents = {"application/vnd.ollama.image.model": weights} | (layers or {})
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    written = []
    for kind, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        (root / "blobs" / f"sha256-{digest}").write_bytes(content)
        written.append({"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)})
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest | {"layers": written}))
    return root / "blobs" / written[0]["digest"].replace(":", "-")
