"""The tiers below the KV cache of a model."""

from __future__ import annotations

import functools

import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.cache import allocation
from quire.worker.cache.storage import KVStorage
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
    kv: KVStorage,
    draft: str | None,
    place: tuple[int, int, int],
    agree: Agree,
) -> TierStore | None:
    """Return the tiers `ready.tiers` of the rank at `place` (rank, ranks, tensor-parallel ranks) with keys and
    values stored as `kv` and the draft model in the folder `draft`; None if there are no tiers.
    """
    if not ready.tiers:
        return None
    blocks = BlockBytes(allocation.attention_layers(model), allocation.state_layers(model), ready.num_blocks)
    storage = str(kv) + (f", drafts of {draft}" if draft is not None else "")
    facts = (ready.block_size, ready.groups, storage, place, blocks.layout, str(_weights_dtype(model)))
    facts += (config.model.load_format, config.model.seed, config.model.quantization)
    mark = functools.cache(lambda: fingerprint(model_identity(config.model.model), facts))
    portable = functools.cache(lambda: fingerprint(model_content(config.model.model), facts))
    about = (
        f"rank {place[0]} of {place[1]} (tensor parallel {place[2]})",
        f"block size {ready.block_size}",
        f"KV cache {_name(kv.dtype)}, {'no' if draft is None else 'a'} draft model",
        f"activations {_name(_weights_dtype(model))}",
        f"weights {config.model.load_format}, {config.model.quantization or 'as in the files'}",
        f"{len(ready.groups)} cache groups",
    )
    tiers = open_tiers(ready.tiers, Rank(config, blocks.gather, mark, *place[:2], agree, portable, about))
    return TierStore(blocks.gather, blocks.scatter, tiers, agree)


def _weights_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the activations: that of the first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
