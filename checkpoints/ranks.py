"""Division of a model over ranks: shares of its sizes, and refusals that name what can be divided. Torch-free."""

from __future__ import annotations


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
    """Return the number of KV heads per rank: several ranks may hold the same one.

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
