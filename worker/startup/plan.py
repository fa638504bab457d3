"""Third stage of a start: bytes of each part, estimated or measured, and the room that they leave to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.worker import estimates, memory
from quire.worker.limits import Choice
from quire.worker.memory import DeviceMemory, Sizes
from quire.worker.messages import MemoryPlan
from quire.worker.startup.load import Loaded
from quire.worker.startup.measuring import measure_activations
from quire.worker.startup.ranks import Ranks
from quire.worker.startup.resolve import Resolved


@dataclass(frozen=True, slots=True)
class Planned:
    """The memory plan of a rank. Numbers of blocks and states are the same on all ranks."""

    memory: MemoryPlan
    num_blocks: int
    num_states: int  # pages for states, excluding those for drafts
    num_spares: int  # pages for the states between drafts
    max_model_len: int
    choices: list[Choice]
    warnings: list[str]


def estimated(resolved: Resolved) -> Sizes:
    """Return the bytes of each part of a rank, from config.json alone."""
    config, spec, limits, ops = resolved.config, resolved.spec, resolved.limits, resolved.platform.ops
    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    weights = estimates.estimate_weights(spec, limits.dtype, tp * pp, config.model.quantization, ops)
    return Sizes(
        weights + estimates.estimate_draft_weights(config, limits, ops),
        _activations(resolved),
        _graphs(resolved),
        estimates.estimate_images(spec, limits, resolved.platform),
        estimates.estimate_adapters(spec, resolved.lora, tp * pp, ops),
        _offload(resolved),
    )


def measured(resolved: Resolved, loaded: Loaded) -> Sizes:
    """Return the bytes of each part of this rank, measured where that is possible."""
    ops = resolved.platform.ops
    return Sizes(
        loaded.weights,
        _activations(resolved, loaded),
        _graphs(resolved) if loaded.one_call else 0,
        estimates.estimate_images(resolved.spec, resolved.limits, resolved.platform) if loaded.stage.first else 0,
        0 if loaded.adapters is None else resolved.lora.num_bytes(loaded.adapters.targets, ops.adapter_copies),
        _offload(resolved),
    )


def _activations(resolved: Resolved, loaded: Loaded | None = None) -> int:
    """Return the bytes of the largest step, measured if the device can and the model is `loaded`."""
    config, spec, limits, platform = resolved.config, resolved.spec, resolved.limits, resolved.platform
    workspace = estimates.estimate_workspace(config, spec, limits, platform)
    if loaded is not None and platform.measures_memory:
        return measure_activations(resolved, loaded) + workspace
    return estimates.estimate_activations(spec, limits, config.parallel.tensor_parallel_size) + workspace


def _graphs(resolved: Resolved) -> int:
    config, tp = resolved.config, resolved.config.parallel.tensor_parallel_size
    return estimates.estimate_graphs(config, resolved.spec, resolved.limits, tp) if resolved.records_graphs else 0


def _offload(resolved: Resolved) -> int:
    """Return the bytes of the tiers that lie in the device's memory."""
    return resolved.tier_ram if resolved.platform.shares_ram else 0


def plan(resolved: Resolved, sizes: Sizes, ranks: Ranks) -> Planned:
    """Divide the device's memory; all ranks call this together.

    Raises ValueError, naming the setting to change, if too little is left to the KV cache.
    """
    config, spec, limits, platform = resolved.config, resolved.spec, resolved.limits, resolved.platform
    total, available = resolved.memory
    if platform.measures_memory:  # other processes, and libraries, may have allocated memory since
        total, available = platform.memory(resolved.num_local)
    room = DeviceMemory(platform.name, total, available, platform.shares_ram)
    found, num_blocks, num_states, choices = memory.plan_memory(config, spec, limits, room, sizes)
    # each rank measures its own memory, but block ids are common to all
    num_blocks, num_states = ranks.minimum([num_blocks, num_states])
    kv_bytes = num_blocks * found.bytes_per_block
    found = msgspec.structs.replace(found, kv_cache=kv_bytes, reserve=found.reserve + found.kv_cache - kv_bytes)
    groups = resolved.cache.groups
    max_model_len, fitted = memory.fit_model_len(limits, num_blocks, found, groups)
    num_spares = memory.spare_states(limits, num_states)
    if num_spares:
        why = "pages for the states between drafts, out of those for prefixes"
        fitted.append(("spare states", str(num_spares), why))
    warnings = memory.warnings_of(limits, max_model_len, found, groups)
    return Planned(found, num_blocks, num_states - num_spares, num_spares, max_model_len, fitted + choices, warnings)


def promise(resolved: Resolved, planned: Planned) -> None:
    """Let servers that start on this machine know the RAM of this rank. Engines of one server were told to share the
    available RAM.
    """
    ram, found = resolved.tier_ram, planned.memory
    if resolved.platform.shares_ram:
        sizes = found.weights, found.activations, found.kv_cache, found.images, found.states, found.adapters
        ram = sum(sizes) + found.offload
    if ram and resolved.config.parallel.data_parallel_size == 1:
        resolved.platform.promise_ram(ram)
