"""Reads the weights of a GGUF file, under the decoder's names and in the order of rows of safetensors checkpoints."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.checkpoints.gguf.header import BLOCKS, GgufFile, GgufTensor, read_gguf
from quire.checkpoints.gguf.names import DENSE, IGNORED, is_stack, row_names, stack_names, tensor_name
from quire.worker.layers.quantization.gguf_blocks import dequantize
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames
from quire.worker.weights.loader import Checkpoint

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint(Checkpoint):
    """The tensors of the file that `config` (a parsed config.json) names. Blocks are uint8 `[rows, bytes]`."""

    is_mapped = False  # the model multiplies the blocks in the mapping; rows in another order are copies

    def __init__(self, folder: str, config: dict[str, Any]):
        super().__init__(folder)
        self.config = config
        self.architecture = ARCHITECTURES[config["quantization_config"]["architecture"]]

    def __enter__(self) -> GgufCheckpoint:
        file = read_gguf(self.config["quantization_config"]["file"])
        maps = _map(file)
        for name, tensor in sorted(file.tensors.items(), key=lambda item: (item[1].path, item[1].start)):
            if name in IGNORED or name.startswith(DENSE):
                continue
            mapping, name = maps[str(tensor.path)], tensor_name(name, self.architecture.names)
            for part_name, part in self._parts(name, tensor):
                stored = _TensorFile(mapping, part, self._view(part_name))
                self._add(part_name, _Dequantized(stored) if part_name.startswith("score.") else stored)
        self._join_latents()
        return self

    def names_of(self, model: CausalLM) -> TensorNames:
        head = () if model.spec.labels else (r"^score\.",)  # of a masked language model
        return TensorNames(ignored=(*type(model).ignored, *head))

    def _add(self, name: str, file: _TensorFile | _Dequantized | _LatentFile) -> None:
        self._file_of[name] = file
        self.position[name] = len(self.position)

    def _parts(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """The tensor itself or, if it is of several modules, those of each."""
        if is_stack(name):
            for i, one in enumerate(stack_names(name, tensor.shape[0])):
                yield from self._rows(one, _slice(tensor, i, tensor.shape[0], tensor.shape[1:]))
        else:
            yield from self._rows(name, tensor)

    def _rows(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """The tensor itself or, if it has the rows of several weights one after another, those of each."""
        names = row_names(name, self.architecture.fused_qkv)
        rows, *others = tensor.shape
        counts = [rows // len(names)] * len(names)
        if len(names) == 3:
            heads = self.config["num_attention_heads"]
            kv_heads = self.config["num_key_value_heads"] or heads
            counts = [rows // (heads + 2 * kv_heads) * number for number in (heads, kv_heads, kv_heads)]
        size, start = tensor.size // rows, tensor.start
        for part, count in zip(names, counts):
            yield part, replace(tensor, shape=(count, *others), start=start, size=count * size)
            start += count * size

    def _view(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes a tensor of the file that of a safetensors checkpoint."""
        if self.architecture.swapped and ".self_attn." in name:
            for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{projection}." in name:
                    return lambda tensor: _unswapped(tensor, self.config[key])
        return _less_one if self.architecture.shifted and name.endswith("norm.weight") else None

    def _join_latents(self) -> None:
        """Newer files have the keys and the values of `kv_b_proj` in tensors of their own."""
        for name in [name for name in self.position if name.endswith(".k_b_proj.weight")]:
            other = name.replace(".k_b_proj.", ".v_b_proj.")
            keys, values = self._file_of.pop(name), self._file_of.pop(other)
            del self.position[name], self.position[other]
            self._add(name.replace(".k_b_proj.", ".kv_b_proj."), _LatentFile(keys, values))


def read_tensor(path: str, name: str) -> torch.Tensor:
    """The values of one tensor of a file, in float32."""
    file = read_gguf(path)
    tensor = file.tensors[name]
    return _TensorFile(_map(file)[str(tensor.path)], tensor, None).dequantized()


def _map(file: GgufFile) -> dict[str, torch.Tensor]:
    """The bytes of each shard, mapped."""
    maps = {}
    for path in {tensor.path for tensor in file.tensors.values()}:
        with path.open("rb") as source:
            mapping = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        maps[str(path)] = torch.frombuffer(mapping, dtype=torch.uint8)
    return maps


def _slice(tensor: GgufTensor, index: int, count: int, shape: tuple[int, ...]) -> GgufTensor:
    """One of `count` equal parts of a tensor."""
    size = tensor.size // count
    return replace(tensor, shape=shape, start=tensor.start + index * size, size=size)


def _unswapped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k: pairs (2 i, 2 i + 1) of each head become (i, i + half)."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _less_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() - 1


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """One tensor, with the interface of an open safetensors file."""

    mapping: torch.Tensor  # the file's bytes
    tensor: GgufTensor
    view: Callable[[torch.Tensor], torch.Tensor] | None

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
        return self.view(tensor) if self.view else tensor

    def dequantized(self) -> torch.Tensor:
        """The values in float32."""
        stored = self.get_tensor("")
        if self.tensor.type in _FLOATS:
            return stored.float()
        return dequantize(stored.flatten(0, -2), self.tensor.type).view(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """A tensor for a layer that has no blocks: the head of a classifier."""

    stored: _TensorFile

    def get_slice(self, name: str) -> _Dequantized:
        return self

    def get_shape(self) -> list[int]:
        return list(self.stored.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.stored.dequantized()


@dataclass(frozen=True, slots=True)
class _LatentFile:
    """`kv_b_proj` `[heads * (N + V), R]` of keys, stored as `[heads, R, N]`, and values `[heads, V, R]`."""

    keys: _TensorFile
    values: _TensorFile

    def get_slice(self, name: str) -> _LatentFile:
        return self

    def get_shape(self) -> list[int]:
        heads, rank, nope = self.keys.tensor.shape
        return [heads * (nope + self.values.tensor.shape[1]), rank]

    def get_dtype(self) -> str:
        return "F32"

    def get_tensor(self, name: str) -> torch.Tensor:
        parts = self.keys.dequantized().transpose(1, 2), self.values.dequantized()
        return torch.cat(parts, 1).flatten(0, 1)
