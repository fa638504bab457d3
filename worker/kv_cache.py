"""The paged KV cache's memory: one K and one V tensor per layer, bound as views to the attention layers, which are the only ones to write them."""

from __future__ import annotations

import torch
from torch import nn

from worker import huge_pages
from worker.layers.attention import Attention


def attention_layers(model: nn.Module) -> list[Attention]:
    """The model's attention layers on this rank, in order."""
    return sorted((module for module in model.modules() if isinstance(module, Attention)), key=lambda layer: layer.layer_index)


def bytes_per_block(layers: list[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all `layers`."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def allocate(layers: list[Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every layer its `k_cache` and `v_cache` of `[num_blocks, block_size, num_kv_heads, head_dim]`.

    On CPU the memory is only reserved: a page, of 2 MiB where the system gives such, becomes resident when a block in it is first written. The null block is
    zeroed, since padding reads it.
    """
    for layer in layers:
        shape = 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim
        if device.type == "cpu":
            cache = huge_pages.zeros(*shape, dtype=dtype)
        else:
            cache = torch.empty(shape, dtype=dtype, device=device)
            cache[:, 0].zero_()
        layer.k_cache, layer.v_cache = cache[0], cache[1]
