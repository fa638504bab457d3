"""Stores of other programs, made in a folder of a test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


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
