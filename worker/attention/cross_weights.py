"""The weights of cross-attention, which attention kernels do not return: recomputed for the heads that requests ask
for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.worker.attention.scaled import KVCache, load


class CrossLayer(Protocol):
    """A layer whose tokens attend to the encoder's output."""

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    k_cache: KVCache


@dataclass(slots=True)
class RequestWeights:
    """The weights of one request in a step. After the step, `found` holds those of its heads, in order."""

    first: int  # the step's tokens that are asked for
    last: int
    slots: torch.Tensor  # [M] int64, of the keys of the encoder's output
    heads: dict[int, list[int]]  # by layer, as this rank counts them
    positions: int  # the first of the output's that are kept
    found: list[torch.Tensor] = field(default_factory=list)  # [heads, tokens, positions] float32 of each layer


@dataclass(slots=True)
class CrossWeights:
    requests: list[RequestWeights]

    def note(self, attn: CrossLayer, q: torch.Tensor) -> None:
        """Compute the weights of a layer from the queries `[T, num_heads * head_dim]` of the step's tokens."""
        group = attn.num_heads // attn.num_kv_heads
        for one in self.requests:
            heads = one.heads.get(attn.layer_index)
            if not heads:
                continue
            queries = q[one.first : one.last].view(-1, attn.num_heads, attn.head_dim)[:, heads].float()
            keys = load(attn.k_cache, one.slots)[:, [head // group for head in heads]]
            scores = torch.einsum("thd,mhd->htm", queries, keys) * attn.scale
            one.found.append(scores.softmax(-1)[..., : one.positions])
