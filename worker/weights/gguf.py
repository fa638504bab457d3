"""Read the weights of a GGUF file, under the decoder's names and in the order of rows of safetensors checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.checkpoints.gguf.header import GgufTensor, read_gguf
from quire.checkpoints.gguf.names import DENSE, IGNORED, is_stack, row_names, stack_names
from quire.worker.spec.index import unread_indexes
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.gguf_tensors import Dequantized, LatentFile, TensorFile, map_files, slice_of

_NORM = re.compile(r"norm(_embedding|_hidden)?\.weight$")


class GgufCheckpoint(Checkpoint):
    """The tensors of the file that `config` (a parsed config.json) names. Blocks are uint8 `[rows, bytes]`."""

    is_mapped = False  # the model multiplies the blocks in the mapping; rows in another order are copies

    def __init__(self, folder: str, config: dict[str, Any]):
        super().__init__(folder)
        self.config = config
        self.architecture = ARCHITECTURES[config["quantization_config"]["architecture"]]

    def __enter__(self) -> GgufCheckpoint:
        file = read_gguf(self.config["quantization_config"]["file"], arrays=False)
        maps, names = map_files(file), self.architecture.tensor_names(file.tensors, self.config["num_hidden_layers"])
        for name, tensor in sorted(file.tensors.items(), key=lambda item: (item[1].path, item[1].start)):
            if name in IGNORED or name.startswith(DENSE):
                continue
            mapping = maps[str(tensor.path)]
            for part_name, part in self._parts(names[name], tensor):
                stored = TensorFile(mapping, part, self._view(part_name))
                wide = part_name.startswith("score.") or part_name.endswith(".dt_proj.weight")
                self._add(part_name, Dequantized(stored) if wide else stored)
        self._join_latents()
        return self

    def names_of(self, model: CausalLM) -> TensorNames:
        head = () if model.spec.labels else (r"^score\.",)  # for a masked language model
        return TensorNames(ignored=(*type(model).ignored, *unread_indexes(model.spec), *head))

    def _add(self, name: str, file: TensorFile | Dequantized | LatentFile) -> None:
        self._file_of[name] = file
        self.position[name] = len(self.position)

    def _parts(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensor itself or, if it is of several modules, those of each."""
        if is_stack(name):
            for i, one in enumerate(stack_names(name, tensor.shape[0])):
                yield from self._rows(one, slice_of(tensor, i, tensor.shape[0], tensor.shape[1:]))
        else:
            yield from self._rows(name, tensor)

    def _rows(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensor itself or, if it has the rows of several weights one after another, those of each."""
        if name.endswith(".mamba.norm.weight"):  # [groups, channels of each]
            tensor = replace(tensor, shape=(math.prod(tensor.shape),))
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
        """Return the conversion of a tensor of the file to that of a safetensors checkpoint."""
        if self.architecture.swapped and ".self_attn." in name:
            for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{projection}." in name:
                    return lambda tensor: _unswapped(tensor, self.config[key])
        if self.architecture.scaled_latents and name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
            return partial(_unscaled, self.config["hidden_size"])
        if name.endswith(".A_log"):
            return _log_of_decay
        if not self.architecture.shifted or not _NORM.search(name) or ".linear_attn." in name:
            return None
        module = name.removesuffix(".weight")
        offset = next((one for end, one in self.architecture.offsets.items() if module.endswith(end)), 1.0)
        return partial(_less, offset) if offset else None

    def _join_latents(self) -> None:
        """Join the keys and values of `kv_b_proj`, which newer files store in separate tensors."""
        for name in [name for name in self.position if name.endswith(".k_b_proj.weight")]:
            other = name.replace(".k_b_proj.", ".v_b_proj.")
            keys, values = self._file_of.pop(name), self._file_of.pop(other)
            del self.position[name], self.position[other]
            self._add(name.replace(".k_b_proj.", ".kv_b_proj."), LatentFile(keys, values))


def _unswapped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of q or k: pairs (2 i, 2 i + 1) of each head become (i, i + half)."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _unscaled(hidden_size: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of a latent without the factor that the model applies to the result."""
    return tensor.float() / (hidden_size / tensor.numel()) ** 0.5


def _log_of_decay(tensor: torch.Tensor) -> torch.Tensor:
    """Return A_log: files hold -exp(A_log), those of Ling 3 exp(A_log)."""
    return tensor.float().abs().log()


def _less(offset: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() - offset
