"""Adapts a step's metadata to the kinds of cache groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from quire.worker.attention.base import AttentionMetadata, GroupedMetadata
from quire.worker.attention.chunked import split_at_chunks
from quire.worker.attention.crossed import attend_to_all
from quire.worker.layers.state import StateSteps
from quire.worker.messages import CacheGroup


def adapt(
    attn: GroupedMetadata,
    groups: Sequence[CacheGroup],
    block_size: int,
    to_device: Callable[[np.ndarray], torch.Tensor],
) -> GroupedMetadata:
    """Return the metadata of a step in which groups of kind "chunk" attend in chunks, groups of kind "cross" to all
    positions of an encoder's output, and groups of kind "state" do not attend, but advance states.
    """
    attn = split_at_chunks(attn, groups, block_size, to_device)
    return tuple(_adapted(meta, group) for meta, group in zip(attn, groups))


def _adapted(meta: AttentionMetadata, group: CacheGroup) -> AttentionMetadata:
    match group.kind:
        case "state":
            return replace(meta, backend=StateSteps())
        case "cross":
            return attend_to_all(meta, group.window)
    return meta
