"""The memory that a loaded model takes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.checkpoints.sizes import format_each
from quire.engine.messages import MemoryPlan

SHARE = 8  # a model's KV cache takes at most 1 / SHARE of the budget, unless its flags say more
LEAST_TOKENS = 2048  # of context for which a model must have room


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a model before it is loaded, in bytes; `error` says why there is none."""

    weights: int = 0
    others: int = 0  # bytes of activations, graphs, states, images, adapters, offloaded blocks
    process: int = 0  # of RAM that an engine takes before it has a model, if the model shares it
    kv_cache: int = 0
    bytes_per_token: int = 0
    max_model_len: int = 0
    total: int = 0  # of the device
    available: int = 0  # of it, when the plan was made
    shares_ram: bool = True
    pooling: list[str] = []
    generates: bool = True
    images: bool = False
    transcribes: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a model takes. With `limits_cache`, `kv_cache` is less than the engine would take by itself."""

    weights: int
    others: int
    kv_cache: int
    limits_cache: bool = False

    @property
    def total(self) -> int:
        return self.weights + self.others + self.kv_cache

    def __str__(self) -> str:
        weights, others, cache, total = format_each(self.weights, self.others, self.kv_cache, self.total)
        return f"{total} (weights {weights}, activations and others {others}, KV cache {cache})"


def need_of(planned: Planned, budget: int, asked: int | None) -> Need:
    """Return what a model takes of a budget, in bytes. Its KV cache is `asked` bytes if its settings say so; otherwise
    at most a share of the budget and at most what the weights leave.
    """
    others = planned.others + planned.process
    fixed = planned.weights + others
    if asked is not None:
        return Need(planned.weights, others, asked)
    least = planned.bytes_per_token * min(planned.max_model_len, LEAST_TOKENS)
    cache = max(min(planned.kv_cache, budget // SHARE, budget - fixed), min(least, planned.kv_cache))
    return Need(planned.weights, others, cache, cache < planned.kv_cache)


def loaded_need(plan: MemoryPlan, process: int) -> Need:
    """Return what a loaded model takes, with the RAM that its engine takes without one."""
    others = plan.activations + plan.graphs + plan.states + plan.images + plan.adapters + plan.offload
    return Need(plan.weights, others + process, plan.kv_cache)


def guessed_need(file_bytes: int, budget: int) -> Need:
    """Return the need of a model without a plan, from the size of its files."""
    return Need(file_bytes, file_bytes // 10 + (256 << 20), min(budget // SHARE, 1 << 30), True)
