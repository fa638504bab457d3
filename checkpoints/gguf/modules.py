"""Writes the pooling settings of a GGUF file as the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.checkpoints.gguf.defaults import metadata_of
from quire.checkpoints.gguf.encoders import pooling_method
from quire.checkpoints.gguf.header import GgufFile, GgufTensor, stored_path
from quire.checkpoints.gguf.names import DENSE

_TYPE = "sentence_transformers.models."


def write_modules(file: GgufFile, folder: Path) -> None:
    """Write modules.json and the files it names, if the file states a pooling method. Vectors are normalized. The
    weights of layers after pooling stay in the GGUF file.

    Raises:
        ValueError: the method is not supported.
    """
    method = pooling_method(metadata_of(file))
    if method is None:
        return
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    _write(folder / "1_Pooling", {"pooling_mode": method})
    for name in DENSE:
        if tensor := file.tensors.get(f"{name}.weight"):
            steps.append(("Dense", f"{len(steps)}_Dense"))
            _write_dense(folder / steps[-1][1], name, tensor, file)
    steps.append(("Normalize", f"{len(steps)}_Normalize"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": _TYPE + kind} for i, (kind, path) in enumerate(steps)]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


def _write_dense(folder: Path, name: str, tensor: GgufTensor, file: GgufFile) -> None:
    outputs, inputs = tensor.shape
    sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
    stored = {"gguf_file": stored_path(file.path), "gguf_tensor": f"{name}.weight"}
    _write(folder, sizes | stored | {"activation_function": "torch.nn.modules.linear.Identity"})


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
