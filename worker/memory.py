"""Plan the device's memory, and derive limits from it: KV cache blocks, context length, requests and tokens per step.

No function here needs weights, so that `quire check` plans with sizes taken from config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

from quire.checkpoints.sizes import format_bytes, format_each
from quire.configs.config import Config
from quire.configs.speculation import MAX_DRAFT
from quire.worker.limits import Choice, Limits
from quire.worker.messages import CacheGroup, MemoryPlan, longest_request, most_blocks
from quire.worker.sampling.speculation.choice import STEP_DRAFTS
from quire.worker.spec.cache import CachePlan, add_drafting, add_heads, plan_cache
from quire.worker.spec.model import ModelSpec, cache_indices, cache_spec, cache_specs, state_specs
from quire.worker.transformer.decoder import stage_layers

# Each running request may hold two states: a checkpoint that it reads, and the one that it writes. In a model that also
# has attention, they take at most half of the memory. Prefix checkpoints raise the states' share to a tenth, or more if
# there is room.
_STATES_PER_REQUEST, _MOST_PER_REQUEST, _MOST_STATES, _CHECKPOINTS = 2, 10, 0.5, 0.1
_ENDLESS = 1 << 60  # bytes
_SHORT = 4  # a context is short below 1 / _SHORT of the requested size
# The default KV cache on CPU has room for --max-num-seqs requests of _CPU_TOKENS, and for _CPU_REQUESTS of full length.
_CPU_TOKENS, _CPU_REQUESTS = 2048, 4


def cache_plan(config: Config, spec: ModelSpec, limits: Limits) -> CachePlan:
    """Return the groups of layers that share block tables, the same on every rank."""
    tp, kv = config.parallel.tensor_parallel_size, limits.kv
    specs = cache_specs(spec, kv.dtype.itemsize, tp, kv.scale_bytes)
    plan = plan_cache(specs, state_specs(spec, tp), limits.attention.block_size)
    if limits.speculation.heads:
        cache = cache_spec(spec.mtp.layer, kv.dtype.itemsize, tp, kv.scale_bytes)
        return add_heads(plan, cache, spec.mtp.count)
    if limits.draft is None:
        return plan
    return add_drafting(plan, cache_specs(limits.draft, kv.dtype.itemsize, tp, kv.scale_bytes))


def bytes_per_block(config: Config, spec: ModelSpec, limits: Limits) -> int:
    """Return bytes of one KV block on the pipeline stage that needs the most."""
    plan, num_stages = cache_plan(config, spec, limits), config.parallel.pipeline_parallel_size
    stages = (stage_layers(spec.layers, rank, num_stages) for rank in range(num_stages))
    return max(plan.page_bytes(limits.attention.block_size, cache_indices(spec, layers)) for layers in stages)


def bytes_per_state(config: Config, spec: ModelSpec, limits: Limits) -> int:
    """Return bytes of the recurrent states of one request on the pipeline stage that needs the most."""
    plan, num_stages = cache_plan(config, spec, limits), config.parallel.pipeline_parallel_size
    stages = (stage_layers(spec.layers, rank, num_stages) for rank in range(num_stages))
    return max(plan.state_bytes(layers) for layers in stages)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one rank: `available` bytes may be used in total, its weights included."""

    device: str
    total: int
    available: int
    shares_ram: bool = False  # it is the machine's RAM, which other programs use, too


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a rank needs in addition to the KV cache."""

    weights: int
    activations: int
    graphs: int = 0
    images: int = 0
    adapters: int = 0
    offload: int = 0  # tiers that lie in the device's memory


def plan_memory(
    config: Config, spec: ModelSpec, limits: Limits, room: DeviceMemory, sizes: Sizes
) -> tuple[MemoryPlan, int, int, list[Choice]]:
    """Return (plan, number of KV blocks including the null block, number of pages for states, choices) for one rank.

    Raises ValueError, naming the settings to change, if not even one block fits.
    """
    block, state = bytes_per_block(config, spec, limits), bytes_per_state(config, spec, limits)
    utilization = config.cache.gpu_memory_utilization
    device, total, available = room.device, room.total, room.available
    budget = int(available * utilization) if room.shares_ram else min(int(total * utilization), available)
    others = sum(astuple(sizes))
    groups = cache_plan(config, spec, limits).groups
    per_request = most_blocks(groups, limits.max_model_len, limits.attention.block_size, limits.max_num_batched_tokens)
    most, need = limits.max_num_seqs * per_request, f"{limits.max_num_seqs} requests of {limits.max_model_len} tokens"
    if room.shares_ram and limits.max_model_len > _CPU_TOKENS:
        short = most_blocks(groups, _CPU_TOKENS, limits.attention.block_size, limits.max_num_batched_tokens)
        most = min(most, max(limits.max_num_seqs * short, _CPU_REQUESTS * per_request))
        need = f"{limits.max_num_seqs} requests of {_CPU_TOKENS} tokens, or {_CPU_REQUESTS} of {limits.max_model_len}"
    blocks = (most + 1) * block
    kv_bytes, choices = _kv_cache_bytes(config, limits, block, state, blocks, budget - others, available - others, need)
    override = config.cache.num_gpu_blocks_override
    num_states, chosen = _num_states(config, limits, state, kv_bytes, override * block if override else blocks)
    choices += chosen
    left_for_blocks = kv_bytes if override else kv_bytes - num_states * state
    num_blocks = override or (left_for_blocks // block if block else 2)
    if num_blocks < 2:
        _refuse(config, limits, room, sizes, 2 * block)
    used, states = num_blocks * block, num_states * state
    reserve = max(available - others - used - states, 0)
    plan = MemoryPlan(
        device,
        total,
        available,
        sizes.weights,
        sizes.activations,
        used,
        reserve,
        block,
        sizes.graphs,
        states,
        sizes.images,
        sizes.adapters,
        sizes.offload,
        room.shares_ram,
    )
    return plan, num_blocks, num_states, choices


def _refuse(config: Config, limits: Limits, room: DeviceMemory, sizes: Sizes, needed: int) -> NoReturn:
    """Raise the ValueError that says why not even one block fits, and the settings to change."""
    others = sizes.weights, sizes.activations + sizes.graphs, sizes.images, sizes.adapters, sizes.offload
    free, weights, computing, images, adapters, below, least = format_each(room.available, *others, needed)
    raise ValueError(
        f"no room for a KV cache: {free} are available on {room.device}, of which "
        f"{config.cache.gpu_memory_utilization:.0%} may be used; weights take {weights}, activations {computing}, "
        f"{f'images {images}, ' if sizes.images else ''}"
        f"{f'LoRA adapters {adapters} (--max-loras, --max-lora-rank), ' if sizes.adapters else ''}"
        f"{f'blocks that leave it {below} (--kv-offload-gib), ' if sizes.offload else ''}"
        f"and a KV cache needs at least {least}. "
        f"Lower --max-num-batched-tokens ({limits.max_num_batched_tokens}) or --max-num-seqs "
        f"({limits.max_num_seqs}), raise --gpu-memory-utilization, or free memory"
    )


def _num_states(config: Config, limits: Limits, state: int, kv_bytes: int, blocks: int) -> tuple[int, list[Choice]]:
    """Return (number of state pages of `state` bytes each, choices). States and blocks share `kv_bytes`, of which the
    blocks take at most `blocks` bytes.

    Raises ValueError, naming the settings to change, if too few fit.
    """
    if not state:
        return 0, []
    most = int(kv_bytes * _MOST_STATES) if blocks else kv_bytes
    fitting, wanted = most // state // _STATES_PER_REQUEST, limits.max_num_seqs
    if fitting < (config.scheduler.max_num_seqs or 1):
        needed, found = format_each(_STATES_PER_REQUEST * wanted * state, most)
        raise ValueError(
            f"--max-num-seqs {wanted}: the recurrent states of {wanted} requests need "
            f"{needed}, but the KV cache's memory has {found} for them: set --max-num-seqs to at most {fitting}, or "
            "raise --gpu-memory-utilization or --kv-cache-memory-bytes"
            if fitting
            else f"no room for the recurrent states of a request, {format_bytes(_STATES_PER_REQUEST * state)}: raise "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, or free memory"
        )
    running = min(fitting, wanted)
    room = max(int(kv_bytes * _CHECKPOINTS), kv_bytes - blocks)
    num_states = max(_STATES_PER_REQUEST * running, min(_most_states(limits), room // state))
    reason = f"{format_bytes(state)} each, two per request and the rest for cached prefixes"
    choices = [("recurrent states", str(num_states), reason)]
    if running < wanted:
        choices.append(("max_num_seqs", str(running), "the recurrent states of so many requests fit"))
    return num_states, choices


def _most_states(limits: Limits) -> int:
    """Return the number of state pages to allocate if there is room."""
    return _MOST_PER_REQUEST * limits.max_num_seqs + _step_drafts(limits)


def _step_drafts(limits: Limits) -> int:
    """Return the most drafts that a step verifies."""
    if not limits.speculation.is_on:
        return 0
    asked = limits.speculation.num_draft
    return STEP_DRAFTS if asked is None else min(asked * limits.max_num_seqs, MAX_DRAFT)


def spare_states(limits: Limits, num_states: int) -> int:
    """Return how many state pages are reserved for drafts: as many as a step verifies, at most half of the pages
    that running requests do not need. The other half is for prefix checkpoints.
    """
    return max(min(_step_drafts(limits), (num_states - _STATES_PER_REQUEST * limits.max_num_seqs) // 2), 0)


def fit_model_len(
    limits: Limits, num_blocks: int, plan: MemoryPlan, groups: Sequence[CacheGroup]
) -> tuple[int, list[Choice]]:
    """Return (context length that fits into `num_blocks`, choices). Raises ValueError if the requested length does not
    fit.
    """
    block_size, chunk = limits.attention.block_size, limits.max_num_batched_tokens
    fitting = longest_request(
        groups, num_blocks - 1, block_size, chunk, max(limits.max_model_len, (num_blocks - 1) * block_size)
    )
    if not limits.auto_model_len:
        if limits.max_model_len > fitting:
            needed, enough = _bytes_for_context(limits, plan, groups)
            wanted, found = format_each(needed, plan.kv_cache)
            raise ValueError(
                f"--max-model-len {limits.max_model_len} needs {wanted} of KV cache, but it has {found}: set "
                f"--max-model-len to at most {fitting} (or auto), or enlarge the KV cache "
                f"with --kv-cache-memory-bytes {enough} or a higher --gpu-memory-utilization"
            )
        return limits.max_model_len, []
    if limits.max_model_len <= fitting:
        return limits.max_model_len, [("max_model_len", str(limits.max_model_len), "the model's maximum")]
    return fitting, [
        ("max_model_len", str(fitting), f"fits into the KV cache; the model's maximum is {limits.max_model_len}")
    ]


def _bytes_for_context(limits: Limits, plan: MemoryPlan, groups: Sequence[CacheGroup]) -> tuple[int, int]:
    """Return (bytes of the blocks for one request of the whole context, the --kv-cache-memory-bytes that has room for
    them and the recurrent states, which take at most half of it).
    """
    blocks = most_blocks(groups, limits.max_model_len, limits.attention.block_size, limits.max_num_batched_tokens) + 1
    needed = blocks * plan.bytes_per_block
    return needed, 2 * (needed + plan.states) if plan.states else needed


def warnings_of(limits: Limits, max_model_len: int, plan: MemoryPlan, groups: Sequence[CacheGroup]) -> list[str]:
    """Return warnings about a context that is much shorter than the model's."""
    if max_model_len * _SHORT > limits.max_model_len:
        return []
    _, enough = _bytes_for_context(limits, plan, groups)
    return [
        f"requests may have {max_model_len} tokens only, of the model's {limits.max_model_len}: the KV cache of "
        f"{format_bytes(plan.kv_cache)} has no room for more, and longer prompts are refused. "
        f"--kv-cache-memory-bytes {enough} has room for all, as may a higher --gpu-memory-utilization; "
        f"--max-model-len {max_model_len} asks for the short context"
    ]


def check_cache(config: Config, spec: ModelSpec, limits: Limits) -> None:
    """Raise ValueError, before weights are loaded, if the settings ask for a KV cache that is too small, whatever the
    available memory, or impossible.
    """
    groups = cache_plan(config, spec, limits).groups
    if config.cache.kv_cache_memory_bytes is None and (config.cache.num_gpu_blocks_override or 0) < 2:
        return
    endless = DeviceMemory("any device", _ENDLESS, _ENDLESS)
    plan, num_blocks, _, _ = plan_memory(config, spec, limits, endless, Sizes(0, 0))
    fit_model_len(limits, num_blocks, plan, groups)


def _kv_cache_bytes(
    config: Config, limits: Limits, block: int, state: int, blocks: int, free: int, left: int, need: str
) -> tuple[int, list[Choice]]:
    """Return (bytes of blocks and states, choices). `blocks` bytes suffice for the blocks of `need`.

    `free` is the memory that the utilization leaves to the cache, `left` the device's memory minus weights and
    activations.
    """
    requested, states = config.cache.kv_cache_memory_bytes, _most_states(limits) * state
    if requested is not None:
        if requested > left:
            raise ValueError(
                f"--kv-cache-memory-bytes {requested} ({format_bytes(requested)}) is more than weights and activations "
                f"leave: set it to at most {max(left, 0)}"
            )
        if requested < 2 * block and not config.cache.num_gpu_blocks_override:
            context = -(-limits.max_model_len // limits.attention.block_size) * block
            whole = 2 * _STATES_PER_REQUEST * state + context + block
            raise ValueError(
                f"--kv-cache-memory-bytes {requested} is too small for two KV blocks of {block} bytes: set it to at "
                f"least {2 * block}, or to {whole} for a full context of {limits.max_model_len} tokens"
            )
        return requested, []
    if config.cache.num_gpu_blocks_override:
        override = config.cache.num_gpu_blocks_override * block
        return override + max(min(states, free - override), 0), []
    most = blocks + states
    if free > most:
        return most, [
            (
                "KV cache",
                format_bytes(most),
                f"at most, as it fills: {need}; --kv-cache-memory-bytes sets another size",
            )
        ]
    return free, [
        (
            "KV cache",
            format_bytes(free // block * block if block else free),
            f"gpu_memory_utilization {config.cache.gpu_memory_utilization:g} minus weights and activations",
        )
    ] if free > 0 else []
