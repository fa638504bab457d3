"""Reads the weights of a GGUF file, under the names and in the order of rows of safetensors checkpoints."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from quire.configs.gguf import BLOCKS, GgufTensor, read_gguf
from quire.configs.gguf_model import ROPE_FACTORS, swapped_heads, tensor_name
from quire.worker.loader import Checkpoint

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint(Checkpoint):
    """The tensors of the file that `config` (a parsed config.json) names. Blocks are uint8 `[rows, bytes]`."""

    is_mapped = False  # the model multiplies the blocks in the mapping; rows in another order are copies

    def __init__(self, folder: str, config: dict[str, Any]):
        super().__init__(folder)
        self.config = config

    def __enter__(self) -> GgufCheckpoint:
        file = read_gguf(self.config["quantization_config"]["file"])
        maps: dict[str, torch.Tensor] = {}
        for name, tensor in sorted(file.tensors.items(), key=lambda item: (item[1].path, item[1].start)):
            if name == ROPE_FACTORS:  # config.json says what they were computed from
                continue
            if str(tensor.path) not in maps:
                with tensor.path.open("rb") as source:
                    mapping = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
                maps[str(tensor.path)] = torch.frombuffer(mapping, dtype=torch.uint8)
            name = tensor_name(name)
            heads = swapped_heads(self.config, name)
            self._file_of[name] = _TensorFile(maps[str(tensor.path)], tensor, heads)
            self.position[name] = len(self.position)
        return self


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """One tensor, with the interface of an open safetensors file."""

    mapping: torch.Tensor  # the file's bytes
    tensor: GgufTensor
    heads: int | None  # whose rows are in the order of interleaved pairs

    def get_slice(self, name: str) -> _TensorFile:
        return self

    def get_shape(self) -> list[int]:
        *rows, columns = self.tensor.shape
        if self.tensor.type in _FLOATS:
            return [*rows, columns]
        values, size = BLOCKS[self.tensor.type]
        return [*rows, columns // values * size]

    def get_dtype(self) -> str:
        return self.tensor.type if self.tensor.type in _FLOATS else "U8"

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self.mapping[self.tensor.start : self.tensor.start + self.tensor.size]
        if dtype := _FLOATS.get(self.tensor.type):
            tensor = tensor.view(dtype)
        tensor = tensor.view(self.get_shape())
        if self.heads is None:
            return tensor
        # pairs (2 i, 2 i + 1) of each head become (i, i + half)
        return tensor.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
