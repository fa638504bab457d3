"""Write safetensors shards as tensors arrive, so that only one shard is in memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

SHARD_BYTES = 2 << 30


class ShardWriter:
    """Writes model.safetensors, or several shards with their index, to `folder`. Call `finish` at the end."""

    def __init__(self, folder: Path, shard_bytes: int):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.num_bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._size = 0
        self._shards: list[list[str]] = []  # names of the tensors in each

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._pending and self._size + tensor.nbytes > self.shard_bytes:
                self._write()
            self._pending[name] = tensor.contiguous()
            self._size += tensor.nbytes
            self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the remaining tensors, and the index."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._path(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _path(self, i: int) -> Path:
        return self.folder / f"model-{i + 1:05}.safetensors.part"

    def _write(self) -> None:
        path = self._path(len(self._shards))
        try:
            save_file(self._pending, path, {"format": "pt"})
        except SafetensorError as error:  # no space, or no permission
            raise ValueError(f"cannot write {path}: {error}") from error
        self._shards.append(list(self._pending))
        self._pending, self._size = {}, 0
