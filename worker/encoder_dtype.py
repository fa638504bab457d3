"""The dtype of float32 encoders under `--dtype auto` on CPU: bfloat16 if embeddings stay close to float32's.

The distance is measured once per model, by embedding random tokens in both dtypes, and kept in $QUIRE_CACHE.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from itertools import pairwise
from pathlib import Path

import torch

from quire.checkpoints.gguf.folder import cache_folder
from quire.configs.config import Config
from quire.worker.attention.base import AttentionMetadata
from quire.worker.models.registry import build_model
from quire.worker.parallel import Group, use_groups
from quire.worker.platforms.base import Platform
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.pooling import Pooler, read_pooling
from quire.worker.weights.gguf_tensors import read_tensor
from quire.worker.weights.loader import load_weights

MOST_DISTANCE = 1e-3  # 1 - cosine
MIN_BYTES = 32 << 20  # of weight files; a smaller model is no faster in bfloat16
_MEMORY_SHARE = 4  # the weights in both types may take 1 / 4 of the memory that is available
_LENGTHS = 8, 32, 96, 256  # tokens of the texts


def resolve_encoder_dtype(config: Config, spec: ModelSpec, platform: Platform) -> tuple[torch.dtype, str] | None:
    """Return (dtype, reason) if this module chooses the model's dtype, else None."""
    files = sorted(Path(config.model.model).glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    if (
        config.model.dtype != "auto"
        or spec.dtype != "float32"
        or not spec.is_encoder
        or spec.labels  # a score has no bound that holds for all models
        or spec.implementation == "transformers"
        or config.model.load_format == "dummy"
        or config.model.pooling == "none"
        or not platform.prefers_bfloat16()
        or size < MIN_BYTES
    ):
        return None
    path = _result_of(files)
    if path.exists():
        distance = float(path.read_text())
    elif size * 3 // 2 > platform.memory()[1] // _MEMORY_SHARE:
        return torch.float32, "dtype of the checkpoint: too little memory to measure what bfloat16 changes"
    else:
        distance = embedding_distance(config, spec, platform)
        with contextlib.suppress(OSError):  # the cache is not writable: the next start measures again
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.write_text(f"{distance:.3g}\n")
            os.replace(draft, path)
    found = f"1 - cosine to float32's embeddings is {distance:.1g} (measured)"
    if distance <= MOST_DISTANCE:
        return torch.bfloat16, f"faster, and {found}"
    return torch.float32, f"dtype of the checkpoint: in bfloat16 {found}, more than {MOST_DISTANCE:g}"


def embedding_distance(config: Config, spec: ModelSpec, platform: Platform) -> float:
    """Return the largest 1 - cosine between embeddings of random tokens in float32 and in bfloat16."""
    exact, rounded = (_embeddings(config, spec, dtype, platform) for dtype in (torch.float32, torch.bfloat16))
    distance = (1 - torch.nn.functional.cosine_similarity(exact, rounded)).max()
    return float(distance.clamp(min=0)) if distance.isfinite() else float("inf")


def _embeddings(config: Config, spec: ModelSpec, dtype: torch.dtype, platform: Platform) -> torch.Tensor:
    """Return the embeddings of texts of random tokens, `[texts, D]` float64. Holds the model in memory during the call.
    """
    folder, device = config.model.model, platform.device
    lengths = [min(length, spec.max_model_len) for length in _LENGTHS]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = torch.randint(spec.vocab_size, (starts[-1],), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    meta = AttentionMetadata(
        backend=None,  # type: ignore[arg-type]  # an encoder computes its attention itself
        slot_mapping=torch.zeros_like(positions),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.zeros(len(lengths), 1, dtype=torch.int32),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        host=(starts, lengths),
    )
    with torch.inference_mode(), use_groups(tp=Group(), pp=Group(), ep=Group()):
        model = build_model(spec, dtype, device, spec.max_model_len, ops=platform.ops)
        load_weights(model, spec, folder, config.model.load_format)
        hidden = model(tokens.to(device), positions.to(device), (meta,))
        pooler = Pooler(read_pooling(folder, spec, config.model.pooling), spec.pooled_size, device, read_tensor)
        states = [pooler.update(None, hidden[i:j], 0) for i, j in pairwise(starts)]
        return pooler.dense(pooler.finish(states, lengths)).double()


def _result_of(files: list[Path]) -> Path:
    """Return the cache file that holds the distance measured for a model with these weights."""
    state = "\n".join(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    return cache_folder().with_name("encoders") / f"{hashlib.sha256(state.encode()).hexdigest()[:16]}.distance"
