"""The tiers below the KV cache of a model."""

from __future__ import annotations

import functools

import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.cache import allocation
from quire.worker.cache.tiers.base import Agree, Rank
from quire.worker.cache.tiers.blocks import BlockBytes
from quire.worker.cache.tiers.fingerprint import fingerprint, model_content, model_identity
from quire.worker.cache.tiers.open import open_tiers
from quire.worker.cache.tiers.store import TierStore
from quire.worker.messages import WorkerReady


def open_store(
    config: Config,
    model: nn.Module,
    ready: WorkerReady,
    storage: str,
    place: tuple[int, int, int],
    agree: Agree,
) -> TierStore | None:
    """Return the tiers `ready.tiers` of the rank at `place` (rank, ranks, tensor-parallel ranks), whose keys and values
    have the type and scales `storage`; None if there are none.
    """
    if not ready.tiers:
        return None
    blocks = BlockBytes(allocation.attention_layers(model), allocation.state_layers(model), ready.num_blocks)
    facts = (ready.block_size, ready.groups, storage, place, blocks.layout, _weights_dtype(model))
    facts += (config.model.load_format, config.model.seed, config.model.quantization)
    mark = functools.cache(lambda: fingerprint(model_identity(config.model.model), facts))
    portable = functools.cache(lambda: fingerprint(model_content(config.model.model), facts))
    kv_type, _, draft = storage.partition(", drafts of ")
    kv_type = kv_type.split(",")[0].split(".")[-1]
    about = (
        f"rank {place[0]} of {place[1]} (tensor parallel {place[2]})",
        f"block size {ready.block_size}",
        f"KV cache {kv_type}, {'a' if draft else 'no'} draft model",
        f"activations {_weights_dtype(model).removeprefix('torch.')}",
        f"weights {config.model.load_format}, {config.model.quantization or 'as in the files'}",
        f"{len(ready.groups)} cache groups",
    )
    tiers = open_tiers(ready.tiers, Rank(config, blocks.gather, mark, *place[:2], agree, portable, about))
    return TierStore(blocks.gather, blocks.scatter, tiers, agree)


def _weights_dtype(model: nn.Module) -> str:
    """Return the type of the activations, as the first parameter in floating point shows it."""
    return next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), str(torch.float32))
