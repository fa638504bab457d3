"""Plan the device's memory, and derive limits from it: KV cache blocks, context length, requests and tokens per step.

No function here needs weights, so `quire check` calls the same functions with sizes taken from config.json.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from quire.checkpoints.sizes import format_bytes, format_each
from quire.configs.config import Config
from quire.configs.speculation import MAX_DRAFT
from quire.worker.cache.tiers.open import plan_tiers, ram_bytes
from quire.worker.estimates import (
    estimate_activations,
    estimate_adapters,
    estimate_draft_weights,
    estimate_graphs,
    estimate_images,
    estimate_weights,
    estimate_workspace,
    media_info,
    uses_graphs,
)
from quire.worker.limits import Choice, Limits, check_settings, resolve_limits
from quire.worker.messages import CacheGroup, MemoryPlan, WorkerReady, longest_request, most_blocks
from quire.worker.models import describe
from quire.worker.models.registry import read_model_spec
from quire.worker.platform import get_platform
from quire.worker.platforms.base import Platform
from quire.worker.sampling.speculation.choice import STEP_DRAFTS
from quire.worker.spec.cache import CachePlan, add_drafting, plan_cache
from quire.worker.spec.model import ModelSpec, cache_spec, cache_specs, state_specs
from quire.worker.transformer.decoder import stage_layers

logger = logging.getLogger(__name__)

# Each running request may hold two states: a checkpoint that it reads, and the one that it writes. These take at most
# half of the memory of a model that also attends. Checkpoints of prefixes raise the states' part to a tenth, or further
# if there is room.
_STATES_PER_REQUEST, _MOST_PER_REQUEST, _MOST_STATES, _CHECKPOINTS = 2, 10, 0.5, 0.1
_ENDLESS = 1 << 60  # bytes
_SHORT = 4  # a context is short below 1 / _SHORT of what was asked for
# The default KV cache on CPU has room for --max-num-seqs requests of _CPU_TOKENS, and for _CPU_REQUESTS of full length.
_CPU_TOKENS, _CPU_REQUESTS = 2048, 4


def cache_plan(config: Config, spec: ModelSpec, limits: Limits) -> CachePlan:
    """The groups of layers that share block tables, the same on every rank."""
    tp, kv = config.parallel.tensor_parallel_size, limits.kv
    plan = plan_cache(cache_specs(spec, kv.dtype.itemsize, tp, kv.scale_bytes), state_specs(spec, tp))
    if limits.speculation.head:
        return add_drafting(plan, [cache_spec(spec.mtp.layer, kv.dtype.itemsize, tp, kv.scale_bytes)])
    if limits.draft is None:
        return plan
    return add_drafting(plan, cache_specs(limits.draft, kv.dtype.itemsize, tp, kv.scale_bytes))


def bytes_per_block(config: Config, spec: ModelSpec, limits: Limits) -> int:
    """Bytes of one KV block on the pipeline stage that needs the most."""
    plan, num_stages = cache_plan(config, spec, limits), config.parallel.pipeline_parallel_size
    stages = (stage_layers(spec.layers, rank, num_stages) for rank in range(num_stages))
    return max(plan.page_bytes(limits.attention.block_size, layers) for layers in stages)


def bytes_per_state(config: Config, spec: ModelSpec, limits: Limits) -> int:
    """Bytes of the recurrent states of one request on the pipeline stage that needs the most."""
    plan, num_stages = cache_plan(config, spec, limits), config.parallel.pipeline_parallel_size
    stages = (stage_layers(spec.layers, rank, num_stages) for rank in range(num_stages))
    return max(plan.state_bytes(layers) for layers in stages)


def plan_memory(
    config: Config,
    spec: ModelSpec,
    limits: Limits,
    *,
    device: str,
    total: int,
    available: int,
    weights: int,
    activations: int,
    graphs: int = 0,
    images: int = 0,
    adapters: int = 0,
    offload: int = 0,
) -> tuple[MemoryPlan, int, int, list[Choice]]:
    """Return (plan, number of KV blocks including the null block, number of pages for states, choices) for one rank.
    `available` is the memory that the rank may use in total: its weights plus free memory.

    Raises ValueError, naming the settings to change, if not even one block fits.
    """
    block, state = bytes_per_block(config, spec, limits), bytes_per_state(config, spec, limits)
    utilization = config.cache.gpu_memory_utilization
    budget = min(int(total * utilization), available) if device != "cpu" else int(available * utilization)
    others = weights + activations + graphs + images + adapters + offload
    groups = cache_plan(config, spec, limits).groups
    per_request = most_blocks(groups, limits.max_model_len, limits.attention.block_size, limits.max_num_batched_tokens)
    most, need = limits.max_num_seqs * per_request, f"{limits.max_num_seqs} requests of {limits.max_model_len} tokens"
    if device == "cpu" and limits.max_model_len > _CPU_TOKENS:  # memory that other programs use, too
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
        sizes = available, weights, activations + graphs, images, adapters, offload, 2 * block
        free, taken, computing, of_images, of_adapters, below, least = format_each(*sizes)
        raise ValueError(
            f"no room for a KV cache: {free} are available on {device}, of which {utilization:.0%} "
            f"may be used; weights take {taken}, activations {computing}, "
            f"{f'images {of_images}, ' if images else ''}"
            f"{f'LoRA adapters {of_adapters} (--max-loras, --max-lora-rank), ' if adapters else ''}"
            f"{f'blocks that leave it {below} (--kv-offload-gib), ' if offload else ''}"
            f"and a KV cache needs at least {least}. "
            f"Lower --max-num-batched-tokens ({limits.max_num_batched_tokens}) or --max-num-seqs "
            f"({limits.max_num_seqs}), raise --gpu-memory-utilization, or free memory"
        )
    used, states = num_blocks * block, num_states * state
    reserve = max(available - others - used - states, 0)
    sizes = weights, activations, used, reserve, block, graphs, states, images, adapters, offload
    plan = MemoryPlan(device, total, available, *sizes)
    return plan, num_blocks, num_states, choices


def _num_states(config: Config, limits: Limits, state: int, kv_bytes: int, blocks: int) -> tuple[int, list[Choice]]:
    """Return (number of pages for states of `state` bytes, choices), out of `kv_bytes` for states and blocks, of which
    the blocks get or need at most `blocks` bytes.

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
    """The number of pages for states that a model has if there is room."""
    return _MOST_PER_REQUEST * limits.max_num_seqs + _step_drafts(limits)


def _step_drafts(limits: Limits) -> int:
    """The most drafts that a step verifies."""
    if not limits.speculation.is_on:
        return 0
    asked = limits.speculation.num_draft
    return STEP_DRAFTS if asked is None else min(asked * limits.max_num_seqs, MAX_DRAFT)


def spare_states(limits: Limits, num_states: int) -> int:
    """How many of the pages for states are for drafts: as many as a step verifies, out of half of those that running
    requests do not need. The other half is for checkpoints of prefixes.
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
    """Return (bytes of the blocks for one request of the whole context, --kv-cache-memory-bytes that has room for them
    and for the recurrent states, which take half of it at most, or two of a request).
    """
    blocks = most_blocks(groups, limits.max_model_len, limits.attention.block_size, limits.max_num_batched_tokens) + 1
    needed = blocks * plan.bytes_per_block
    return needed, 2 * (needed + plan.states) if plan.states else needed


def _warnings(limits: Limits, max_model_len: int, plan: MemoryPlan, groups: Sequence[CacheGroup]) -> list[str]:
    """A context that is much shorter than the model's."""
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
    """Raise ValueError, before weights are loaded, if the KV cache of the settings is too small, however much memory
    there is, or cannot be as they ask.
    """
    groups = cache_plan(config, spec, limits).groups
    if config.cache.kv_cache_memory_bytes is None and (config.cache.num_gpu_blocks_override or 0) < 2:
        return
    everything = {"device": "any device", "total": _ENDLESS, "available": _ENDLESS, "weights": 0, "activations": 0}
    plan, num_blocks, _, _ = plan_memory(config, spec, limits, **everything)
    fit_model_len(limits, num_blocks, plan, groups)


def preview(config: Config) -> WorkerReady:
    """Estimate what a worker would report, from config.json and the memory that is free now, without loading weights.

    Raises ValueError as the worker would.
    """
    platform = get_platform(config.device.device)
    options = config.model
    spec = read_model_spec(options.model, options.model_impl, images=not options.language_model_only)
    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    num_ranks = tp * pp * config.parallel.data_parallel_size
    check_settings(config, spec)
    started = platform.start(
        config.device.num_threads,
        num_ranks,
        config.device.deterministic is True,
        config.server.api_server_count,
        config.device.cpu_level,
        config.device.cpu_activation_bits,
        preview=True,
    )
    if warning := platform.ops_warning():
        logger.warning("%s", warning)
    limits = resolve_limits(config, spec, platform)
    spec = limits.with_drafts(spec)
    check_cache(config, spec, limits)
    total, available = platform.memory(num_ranks)
    tiers = [] if spec.is_encoder else plan_tiers(config, platform)
    plan, num_blocks, num_states, choices = plan_memory(
        config,
        spec,
        limits,
        device=platform.name,
        total=total,
        available=available,
        weights=estimate_weights(spec, limits.dtype, tp * pp, config.model.quantization, platform.ops)
        + estimate_draft_weights(config, limits, platform.ops),
        activations=estimate_activations(spec, limits, tp) + estimate_workspace(config, spec, limits, platform),
        graphs=estimate_graphs(config, spec, limits, tp) if uses_graphs(config, spec, limits, platform) else 0,
        images=estimate_images(spec, limits, platform),
        adapters=estimate_adapters(config, spec, tp, pp),
        offload=ram_bytes(tiers) // (tp * pp) if platform.device.type == "cpu" else 0,
    )
    ready = report(
        spec,
        platform,
        limits,
        plan,
        num_blocks,
        started + choices,
        cache_plan(config, spec, limits).groups,
        pp,
        num_states,
    )
    return msgspec.structs.replace(ready, tiers=tiers)


def report(
    spec: ModelSpec,
    platform: Platform,
    limits: Limits,
    plan: MemoryPlan,
    num_blocks: int,
    choices: list[Choice],
    groups: Sequence[CacheGroup],
    pp: int = 1,
    num_states: int = 0,
) -> WorkerReady:
    """Combine limits, plan and choices into `WorkerReady`, with the context length that fits, for `pp` pipeline stages.

    Raises ValueError as `fit_model_len` does.
    """
    max_model_len, fitted = fit_model_len(limits, num_blocks, plan, groups)
    num_spares = spare_states(limits, num_states)
    if num_spares:
        fitted.append(
            ("spare states", str(num_spares), "pages for the states between drafts, out of those for prefixes")
        )
    num_states -= num_spares
    depth = platform.default_depth if pp == 1 else pp + 1  # one step per stage, and one for the scheduler
    return WorkerReady(
        num_blocks=num_blocks,
        block_size=limits.attention.block_size,
        max_model_len=max_model_len,
        max_num_seqs=min(limits.max_num_seqs, num_states // 2) if num_states else limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        default_depth=depth,
        plan=plan,
        choices=[describe.choice(spec), *limits.choices, *fitted, *choices],
        groups=list(groups),
        media=media_info(spec, limits, platform),
        num_states=num_states,
        warnings=_warnings(limits, max_model_len, plan, groups),
    )


def _kv_cache_bytes(
    config: Config, limits: Limits, block: int, state: int, blocks: int, free: int, left: int, need: str
) -> tuple[int, list[Choice]]:
    """Return (bytes of blocks and states, choices). `blocks` bytes would do for the blocks of `need`.

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
