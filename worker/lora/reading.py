"""Read the matrices of adapters, in both formats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from safetensors import safe_open

from quire.checkpoints.gguf.header import read_gguf
from quire.checkpoints.lora_files import LoraFiles
from quire.worker.weights.gguf_tensors import TensorFile, map_files

# Reads a tensor, or one of those along its first dimension, in float32.
Read = Callable[[str, int | None], torch.Tensor]


@contextlib.contextmanager
def open_matrices(lora: LoraFiles) -> Iterator[Read]:
    """Yield a reader of an adapter's tensors. It raises ValueError if a weight is infinite or not a number."""
    if lora.is_gguf:
        file = read_gguf(lora.weights)
        mapping = map_files(file)[str(lora.weights)]
        yield _reader(lambda name: TensorFile(mapping, file.tensors[name], None).dequantized())
    else:
        with safe_open(lora.weights, "pt") as stored:
            yield _reader(stored.get_tensor)


def _reader(get: Callable[[str], torch.Tensor]) -> Read:
    @lru_cache(maxsize=2)  # A and B of all experts are read for each of them
    def whole(name: str) -> torch.Tensor:
        tensor = get(name)
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} has a weight that is infinite or not a number (NaN)")
        return tensor.float()

    return lambda name, index: whole(name) if index is None else whole(name)[index]


def unswapped(b: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of q or k: pairs (2 i, 2 i + 1) of each head become (i, i + half)."""
    return b.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
