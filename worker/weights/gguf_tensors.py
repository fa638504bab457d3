"""Tensors in a GGUF file, with the interface of open safetensors files."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.checkpoints.gguf.header import BLOCKS, GgufFile, GgufTensor, read_gguf
from quire.worker.layers.quantization.gguf_blocks import dequantize

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(path: str, name: str) -> torch.Tensor:
    """Return the values of one tensor of a file, in float32."""
    file = read_gguf(path, arrays=False)
    tensor = file.tensors[name]
    return TensorFile(map_files(file)[str(tensor.path)], tensor, None).dequantized()


def map_files(file: GgufFile) -> dict[str, torch.Tensor]:
    """Return the bytes of each shard, mapped."""
    maps = {}
    for path in {tensor.path for tensor in file.tensors.values()}:
        with path.open("rb") as source:
            mapping = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        maps[str(path)] = torch.frombuffer(mapping, dtype=torch.uint8)
    return maps


def slice_of(tensor: GgufTensor, index: int, count: int, shape: tuple[int, ...]) -> GgufTensor:
    """Return one of `count` equal parts of a tensor."""
    size = tensor.size // count
    return replace(tensor, shape=shape, start=tensor.start + index * size, size=size)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One tensor of a GGUF file, with the interface of an open safetensors file."""

    mapping: torch.Tensor  # the file's bytes
    tensor: GgufTensor
    view: Callable[[torch.Tensor], torch.Tensor] | None

    def get_slice(self, name: str) -> TensorFile:
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
        return self.view(tensor) if self.view else tensor

    def dequantized(self) -> torch.Tensor:
        """Return the values in float32."""
        stored = self.get_tensor("")
        if self.tensor.type in _FLOATS:
            return stored.float()
        return dequantize(stored.flatten(0, -2), self.tensor.type).view(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A tensor for a layer that has no blocks: the head of a classifier."""

    stored: TensorFile

    def get_slice(self, name: str) -> Dequantized:
        return self

    def get_shape(self) -> list[int]:
        return list(self.stored.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.stored.dequantized()


@dataclass(frozen=True, slots=True)
class LatentFile:
    """`kv_b_proj` `[heads * (N + V), R]` of keys, stored as `[heads, R, N]`, and values `[heads, V, R]`."""

    keys: TensorFile
    values: TensorFile

    def get_slice(self, name: str) -> LatentFile:
        return self

    def get_shape(self) -> list[int]:
        heads, rank, nope = self.keys.tensor.shape
        return [heads * (nope + self.values.tensor.shape[1]), rank]

    def get_dtype(self) -> str:
        return "F32"

    def get_tensor(self, name: str) -> torch.Tensor:
        parts = self.keys.dequantized().transpose(1, 2), self.values.dequantized()
        return torch.cat(parts, 1).flatten(0, 1)
