"""How many ranks can divide a model, as far as config.json says it in keys that mean the same in every family.
Torch-free: a start that must fail does so before any process begins. Families refuse more (`worker/limits.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.checkpoints.config_schema import TEXT_PARTS
from quire.checkpoints.reading import read_object


def check_ranks(folder: str, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise ValueError, naming the key, if the ranks cannot divide the model in `folder`."""
    raw = read_object(Path(folder, "config.json"))
    raw = next((raw[key] for key in TEXT_PARTS if isinstance(raw.get(key), dict)), raw)
    if (heads := _count(raw, "num_attention_heads")) is not None:
        share("num_attention_heads", heads, tensor_parallel)
    if (kv_heads := _count(raw, "num_key_value_heads")) is not None:
        share_kv_heads(kv_heads, tensor_parallel)
    layers = _count(raw, "num_hidden_layers")
    if layers is not None and pipeline_parallel > layers:
        raise ValueError(too_many_stages(pipeline_parallel, layers))


def _count(raw: dict[str, Any], key: str) -> int | None:
    """The value of a key that is the same for all layers; None if it is missing or of another kind."""
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def share(name: str, size: int, ranks: int) -> int:
    """Return a rank's share of `size`. Raises ValueError naming the size and the numbers of ranks that divide it."""
    if size % ranks:
        fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
        raise ValueError(
            f"{name} {size} cannot be split over tensor_parallel_size {ranks}; sizes that divide it: "
            f"{', '.join(fitting)}"
        )
    return size // ranks


def share_kv_heads(num_kv_heads: int, ranks: int) -> int:
    """Return how many KV heads a rank holds: several ranks may hold the same one.

    Raises ValueError if the number of ranks is neither a divisor nor a multiple of the number of KV heads.
    """
    if num_kv_heads >= ranks:
        return share("num_key_value_heads", num_kv_heads, ranks)
    if ranks % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads {num_kv_heads} cannot be split over tensor_parallel_size {ranks}: "
            f"use a size that divides {num_kv_heads} or is a multiple of it"
        )
    return 1


def too_many_stages(stages: int, layers: int, more: str = "") -> str:
    return f"pipeline_parallel_size {stages} is more than the model's num_hidden_layers {layers}{more}"
