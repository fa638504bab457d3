"""The contents of a block or of a page with states as bytes, and back."""

from __future__ import annotations

import torch

from quire.worker.attention.scaled import tensors_of
from quire.worker.layers.attention import Attention
from quire.worker.layers.state import RecurrentState


class BlockBytes:
    """Reads and writes this rank's content of a block. The tensors of all layers that use one page at a time make up
    its content. On CPU the entries of all layers in a block are contiguous: one piece of memory.
    """

    def __init__(self, layers: list[Attention], states: list[RecurrentState], num_blocks: int):
        self._num_blocks = num_blocks
        caches = [cache for layer in layers if layer.kv_from is None for cache in (layer.k_cache, layer.v_cache)]
        self._blocks = _distinct([tensor for cache in caches for tensor in tensors_of(cache)])
        if len({tensor.untyped_storage().data_ptr() for tensor in self._blocks}) == 1:
            self._blocks = [_rows(self._blocks)]
        self._states = [pages for state in states for pages in state.pages]

    @property
    def layout(self) -> list[tuple]:
        """Return the layout of the bytes: shapes, types and order of the parts."""
        return [
            (kind, tuple(tensor.shape[1:]), str(tensor.dtype), tensor.stride()[1:])
            for kind, tensors in (("block", self._blocks), ("state", self._states))
            for tensor in tensors
        ]

    def gather(self, block_id: int) -> bytes:
        """Return the content of a block, after all launched work on the block."""
        parts = [_bytes(tensor[i]) for tensor, i in self._parts(block_id)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy().tobytes()

    def scatter(self, block_id: int, content: bytes) -> None:
        """Write the content of a block. Raises ValueError if it has another size."""
        parts = self._parts(block_id)
        sizes = [tensor[i].numel() * tensor.itemsize for tensor, i in parts]
        if sum(sizes) != len(content):
            raise ValueError(f"a block has {sum(sizes)} bytes, not {len(content)}")
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for (tensor, i), part in zip(parts, data.split(sizes)):
            target = tensor[i]
            target.copy_(part.clone().view(tensor.dtype).view(target.shape))  # cloned to align it for its type

    def _parts(self, block_id: int) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors, and the index of the block in them. Pages of states are numbered from 1 after all
        blocks.
        """
        if block_id >= self._num_blocks:
            return [(pages, block_id - self._num_blocks + 1) for pages in self._states]
        return [(tensor, block_id) for tensor in self._blocks]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that are not views of others' memory: values in a latent, layers that share the memory of
    another.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        known = found.get(tensor.data_ptr())
        if known is None or known[0].numel() * known.itemsize < tensor[0].numel() * tensor.itemsize:
            found[tensor.data_ptr()] = tensor
    return list(found.values())


def _rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the memory of all blocks `[num_blocks, bytes]`, of which these tensors are views."""
    storage = tensors[0].untyped_storage()
    start = min(tensor.data_ptr() for tensor in tensors) - storage.data_ptr()
    size = tensors[0].stride(0) * tensors[0].itemsize
    rows = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return rows.set_(storage, start, (len(tensors[0]), size), (size, 1))
