"""Plan the device's memory, and derive limits from it: KV cache blocks, context length, requests and tokens per step.

No function here needs weights, so `quire check` calls the same functions with sizes taken from config.json.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from quire.configs.config import Config
from quire.configs.speculation import MAX_DRAFT
from quire.worker.attention.base import AttentionSpec
from quire.worker.attention.registry import Selection, select_backend
from quire.worker.batch.graphs import padded_sizes
from quire.worker.cache.spec import CachePlan, add_drafting, plan_cache
from quire.worker.cache.storage import KVStorage, resolve_storage
from quire.worker.cache.tiers.sizes import disk_bytes, offload_bytes
from quire.worker.encoder_dtype import resolve_encoder_dtype
from quire.worker.layers.linear import split_kv_heads
from quire.worker.layers.lora import StepLora
from quire.worker.layers.mla import EXPANDED_BYTES
from quire.worker.lora.adapters import LoraLimits
from quire.worker.lora.targets import Targets
from quire.worker.messages import CacheGroup, MediaInfo, MemoryPlan, WorkerReady, longest_request, most_blocks
from quire.worker.models import describe
from quire.worker.models.registry import build_model, encoder_bytes_per_embed, read_model_spec, weight_bytes
from quire.worker.parallel import Group, split_size
from quire.worker.platforms.base import Platform
from quire.worker.platforms.ops import Ops
from quire.worker.platforms.platform import get_platform
from quire.worker.sampling.speculation.choice import STEP_DRAFTS, Speculation, resolve_speculation
from quire.worker.sampling.speculation.draft_spec import draft_quantization, read_draft_spec, read_eagle_spec
from quire.worker.transformer.config import LayerSpec, ModelSpec, cache_spec, cache_specs, state_specs
from quire.worker.transformer.decoder import stage_layers
from quire.worker.transformer.moe_spec import MoESpec

logger = logging.getLogger(__name__)

Choice = tuple[str, str, str]  # setting, value, reason
# Each running request may hold two states: a checkpoint that it reads, and the one that it writes. These take at most
# half of the memory of a model that also attends. Checkpoints of prefixes raise the states' part to a tenth, or further
# if there is room.
_STATES_PER_REQUEST, _MOST_PER_REQUEST, _MOST_STATES, _CHECKPOINTS = 2, 10, 0.5, 0.1
# The default KV cache on CPU has room for --max-num-seqs requests of _CPU_TOKENS, and for _CPU_REQUESTS of full length.
_CPU_TOKENS, _CPU_REQUESTS = 2048, 4
_LARGEST_IMAGE = 16384  # embeddings: Qwen2-VL's largest, 12.8 million pixels


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that are fixed before weights are loaded.

    `max_model_len` is the maximum context length; if it is automatic, the available memory may still lower it.
    """

    dtype: torch.dtype
    kv: KVStorage
    attention: Selection
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    auto_model_len: bool
    deterministic: bool
    speculation: Speculation
    draft: ModelSpec | None  # of a draft model or an EAGLE-3 head
    choices: list[Choice]


def resolve_limits(config: Config, spec: ModelSpec, platform: Platform) -> Limits:
    """Resolve dtype, attention backend and the sizes of a step.

    Raises ValueError for settings that do not fit the model or the device.
    """
    choices: list[Choice] = []
    tp, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    _check_divisible(spec, tp, stages, config.parallel.enable_expert_parallel)
    dtype, reason = (
        _quantized_dtype(config)
        if config.model.quantization
        else resolve_encoder_dtype(config, spec, platform) or platform.resolve_dtype(config.model.dtype, spec.dtype)
    )
    if config.model.dtype == "auto" or _dtype_name(dtype) != config.model.dtype:
        choices.append(("dtype", _dtype_name(dtype), reason))
    kv, choice = resolve_storage(config, spec, dtype)
    choices.append(choice)
    deterministic, reason = platform.batch_invariance(config, spec, dtype)
    choices.append(("deterministic", "on" if deterministic else "off", reason))
    speculation, choice = resolve_speculation(config, spec, platform, deterministic)
    choices.append(choice)
    read_draft = read_eagle_spec if speculation.eagle else read_draft_spec
    draft = read_draft(config, spec, speculation.model) if speculation.model else None
    order = ("cpu_fixed",) if deterministic else platform.attention_order
    specs = attention_specs(config, spec, platform, dtype, kv, draft)
    attention = select_backend(order, specs, config.device.attention_backend)
    if not specs and config.cache.block_size:  # a block is the distance of possible checkpoints of states
        attention = replace(attention, block_size=config.cache.block_size)
    if config.device.attention_backend is None:
        choices.append(("attention_backend", attention.backend.name, attention.reason))
    _check_chunks(spec, attention.block_size)
    if config.cache.block_size is None:
        choices.append(("block_size", str(attention.block_size), f"default of {attention.backend.name}"))
    num_seqs, num_tokens, reason = platform.default_limits(tp * stages)
    if config.scheduler.max_num_seqs is None:
        choices.append(("max_num_seqs", str(num_seqs), reason))
    if config.scheduler.max_num_batched_tokens is None:
        choices.append(("max_num_batched_tokens", str(num_tokens), reason))
    model_len, auto = _requested_model_len(config.model.max_model_len, spec)
    if spec.why_shorter:
        choices.append(("longest context", str(spec.max_model_len), spec.why_shorter))
    if spec.is_encoder:
        model_len, num_tokens = _whole_prompts(config, model_len, num_tokens, auto)
    return Limits(
        dtype,
        kv,
        attention,
        config.scheduler.max_num_seqs or num_seqs,
        config.scheduler.max_num_batched_tokens or num_tokens,
        model_len,
        auto,
        deterministic,
        speculation,
        draft,
        choices,
    )


def estimate_weights(
    spec: ModelSpec, dtype: torch.dtype, world_size: int, quantization: str | None = None, ops: Ops | None = None
) -> int:
    """Bytes of the weights on each rank, estimated before loading; with `quantization`, their quantized size. An
    encoder of images is whole on every rank. `ops` decide which quantized weights stay so.
    """
    text = weight_bytes(replace(spec, vision=None), dtype, quantization, ops)
    return text // world_size + weight_bytes(spec, dtype, quantization, ops) - text


def estimate_draft_weights(config: Config, limits: Limits, ops: Ops) -> int:
    """Bytes of the weights of a draft model."""
    if limits.draft is None:
        return 0
    return weight_bytes(limits.draft, limits.dtype, draft_quantization(config, limits.draft), ops)


def media_info(spec: ModelSpec, limits: Limits, platform: Platform) -> MediaInfo | None:
    """The images that requests may have, and how many embeddings are computed and kept."""
    if spec.vision is None:
        return None
    size = max(limits.max_num_batched_tokens, min(limits.max_model_len, _LARGEST_IMAGE))
    budget, vision = min(limits.max_num_batched_tokens, platform.encoder_budget or size), spec.vision
    return MediaInfo(vision.image_token_id, size, budget, vision.bidirectional, vision.mrope)


def estimate_images(spec: ModelSpec, limits: Limits, platform: Platform) -> int:
    """Bytes of the embeddings that are kept, and of what encoding the largest batch, or the largest image, needs."""
    media = media_info(spec, limits, platform)
    if media is None:
        return 0
    kept = spec.vision.width(spec.hidden_size) * limits.dtype.itemsize
    return media.cache_size * (kept + encoder_bytes_per_embed(spec, limits.dtype))


def estimate_activations(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Bytes that the largest step needs in addition to weights and KV cache, of the draft model if that needs more."""
    specs = (spec,) if limits.draft is None else (spec, limits.draft)
    return max(_activations(one, limits, tp) for one in specs)


def _activations(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Bytes that the largest step of a model needs: the widest layer, the logits, gathered keys and values, and tables.

    The logits exist in three copies: in the model's dtype or this rank's share, in float32, and raw, before penalties
    and masks, for log-probabilities.
    """
    layer = limits.max_num_batched_tokens * _layer_bytes(spec, limits, tp)
    logits = limits.max_num_seqs * spec.vocab_size * 4 * 3
    # the torch backend's copy of one long sequence
    gathered = max(8192, limits.max_model_len) * _kv_width(spec, tp) * limits.dtype.itemsize
    tables = limits.max_num_seqs * limits.max_model_len * 4 * 2
    # keys and values of latents, before and after they are put together
    expanded = 2 * EXPANDED_BYTES if any(layer.latent for layer in spec.layers) else 0
    scratch = 256 << 20  # sampling some rows, prompt logprobs of some positions, attention scores of some queries
    return layer + logits + gathered + tables + expanded + scratch


def estimate_workspace(config: Config, spec: ModelSpec, limits: Limits, platform: Platform) -> int:
    """Bytes of temporary memory that the attention backend allocates for steps of the largest batch."""
    specs = attention_specs(config, spec, platform, limits.dtype, limits.kv, limits.draft)
    workspace = limits.attention.backend.workspace
    return max((workspace(one, limits.max_num_seqs, limits.max_model_len) for one in specs), default=0)


def estimate_graphs(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Bytes that CUDA graphs need once all sizes are recorded: their results, one set of activations (they share a
    pool, which fragments), workspaces, and the driver's memory per graph.
    """
    sizes = padded_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens))
    results = sum(sizes) * spec.hidden_size * limits.dtype.itemsize
    return results + 2 * sizes[-1] * _layer_bytes(spec, limits, tp) + (128 << 20) + len(sizes) * (12 << 20)


def _layer_bytes(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Bytes that one token needs inside the widest layer."""
    widest = max(3 * (layer.num_heads * layer.head_dim + layer.intermediate_size) // tp for layer in spec.layers)
    experts = max(_expert_bytes(layer.moe, spec.hidden_size, limits.dtype.itemsize) for layer in spec.layers)
    layer = limits.dtype.itemsize * (4 * spec.hidden_size + 2 * _kv_width(spec, tp) + widest)
    return layer + 8 * spec.hidden_size + experts


def _expert_bytes(moe: MoESpec | None, hidden_size: int, itemsize: int) -> int:
    """Bytes that one token needs for its experts: their inputs and activations, and results in float32."""
    return moe.routing.top_k * (itemsize * (hidden_size + 3 * moe.intermediate_size) + 4 * hidden_size) if moe else 0


def _kv_width(spec: ModelSpec, tp: int) -> int:
    """Most entries that one token's keys and values have in a layer, on each of `tp` ranks."""
    return max((cache.page_bytes(1) for cache in cache_specs(spec, 1, tp) if cache), default=0)


def estimate_adapters(config: Config, spec: ModelSpec, tp: int, pp: int) -> int:
    """Bytes of as many LoRA adapters of the largest rank as may be loaded, on each rank. Raises ValueError."""
    if not config.lora.enabled:
        return 0
    model = build_model(spec, torch.float32, torch.device("meta"))
    return LoraLimits.of(config.lora).num_bytes(Targets(model, StepLora())) // (tp * pp)


def uses_graphs(config: Config, spec: ModelSpec, limits: Limits, platform: Platform) -> bool:
    """Return whether steps will be recorded: the device and the attention backend support it, there is one pipeline
    stage, the model is ours (transformers' code may wait for the device), and --enforce-eager is off. Attention with a
    window of the output is not recorded either; nor, which only the loaded model shows, experts that differ in form:
    they are multiplied one by one, by a list of those that have tokens, for which the host waits.
    """
    return (
        platform.has_graphs
        and spec.implementation == "quire"
        and not spec.is_encoder
        and not any(layer.output_window for layer in spec.layers)
        and limits.attention.backend.graph_safe
        and config.parallel.pipeline_parallel_size == 1
        and not config.device.enforce_eager
    )


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
    num_states, chosen = _num_states(config, limits, state, kv_bytes, blocks)
    choices += chosen
    left_for_blocks = kv_bytes if config.cache.num_gpu_blocks_override else kv_bytes - num_states * state
    num_blocks = config.cache.num_gpu_blocks_override or (left_for_blocks // block if block else 2)
    if num_blocks < 2:
        raise ValueError(
            f"no room for a KV cache: {_size(available)} are available on {device}, of which {utilization:.0%} "
            f"may be used; weights take {_size(weights)}, activations {_size(activations + graphs)}, "
            f"{f'images {_size(images)}, ' if images else ''}"
            f"{f'LoRA adapters {_size(adapters)} (--max-loras, --max-lora-rank), ' if adapters else ''}"
            f"{f'blocks that leave it {_size(offload)} (--kv-offload-gib), ' if offload else ''}"
            f"and a KV cache needs at least {_size(2 * block)}. "
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
    `blocks` bytes would do for the blocks of all requests.

    Raises ValueError, naming the settings to change, if too few fit.
    """
    if not state:
        return 0, []
    most = int(kv_bytes * _MOST_STATES) if blocks else kv_bytes
    fitting, wanted = most // state // _STATES_PER_REQUEST, limits.max_num_seqs
    if fitting < (config.scheduler.max_num_seqs or 1):
        raise ValueError(
            f"--max-num-seqs {wanted}: the recurrent states of {wanted} requests need "
            f"{_size(_STATES_PER_REQUEST * wanted * state)}, but the KV cache's memory has {_size(most)} for them: set "
            f"--max-num-seqs to at most {fitting}, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
            if fitting
            else f"no room for the recurrent states of a request, {_size(_STATES_PER_REQUEST * state)}: raise "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, or free memory"
        )
    running = min(fitting, wanted)
    room = max(int(kv_bytes * _CHECKPOINTS), kv_bytes - blocks)
    num_states = max(_STATES_PER_REQUEST * running, min(_MOST_PER_REQUEST * wanted, room // state))
    reason = f"{_size(state)} each, two per request and the rest for cached prefixes"
    choices = [("recurrent states", str(num_states), reason)]
    if running < wanted:
        choices.append(("max_num_seqs", str(running), "the recurrent states of so many requests fit"))
    return num_states, choices


def spare_states(limits: Limits, num_states: int) -> int:
    """How many of the pages for states are for drafts: as many as a step verifies, out of those that running requests
    do not need.
    """
    if not limits.speculation.is_on:
        return 0
    asked = limits.speculation.num_draft
    most = STEP_DRAFTS if asked is None else min(asked * limits.max_num_seqs, MAX_DRAFT)
    return max(min(most, num_states - _STATES_PER_REQUEST * limits.max_num_seqs), 0)


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
            needed = (most_blocks(groups, limits.max_model_len, block_size, chunk) + 1) * plan.bytes_per_block
            raise ValueError(
                f"--max-model-len {limits.max_model_len} needs {_size(needed)} of KV cache, but it has "
                f"{_size(plan.kv_cache)}: set --max-model-len to at most {fitting} (or auto), or enlarge the KV cache "
                f"with --kv-cache-memory-bytes {needed} or a higher --gpu-memory-utilization"
            )
        return limits.max_model_len, []
    if limits.max_model_len <= fitting:
        return limits.max_model_len, [("max_model_len", str(limits.max_model_len), "the model's maximum")]
    return fitting, [
        ("max_model_len", str(fitting), f"fits into the KV cache; the model's maximum is {limits.max_model_len}")
    ]


def preview(config: Config) -> WorkerReady:
    """Estimate what a worker would report, from config.json and the memory that is free now, without loading weights.

    Raises ValueError as the worker would.
    """
    platform = get_platform(config.device.device)
    options = config.model
    spec = read_model_spec(options.model, options.model_impl, images=not options.language_model_only)
    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    num_ranks = tp * pp * config.parallel.data_parallel_size
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
    spec = replace(spec, has_head=limits.speculation.head)
    total, available = platform.memory(num_ranks)
    offload = 0 if spec.is_encoder else offload_bytes(config, platform)
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
        graphs=estimate_graphs(spec, limits, tp) if uses_graphs(config, spec, limits, platform) else 0,
        images=estimate_images(spec, limits, platform),
        adapters=estimate_adapters(config, spec, tp, pp),
        offload=offload // (tp * pp) if platform.device.type == "cpu" else 0,
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
    disk = disk_bytes(config) if config.cache.enable_prefix_caching and not spec.is_encoder else 0
    return msgspec.structs.replace(ready, offload_bytes=offload, disk_bytes=disk)


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
    )


def _check_divisible(spec: ModelSpec, tp: int, stages: int, expert_parallel: bool = False) -> None:
    """Raise ValueError, naming the size, if the ranks do not divide it, or if there are no experts to divide."""
    group = Group()
    group.size = tp
    if expert_parallel and not any(layer.moe for layer in spec.layers):
        raise ValueError(f"--enable-expert-parallel: {spec.architecture} has no experts; omit it")
    for layer in spec.layers:
        split_size("num_attention_heads", layer.num_heads, group)
        split_kv_heads(layer.num_kv_heads, group)
        if layer.mlp != "moe":
            split_size("intermediate_size", layer.intermediate_size, group)
        if layer.moe and expert_parallel:
            split_size("the number of experts", layer.moe.routing.num_experts, group)
        elif layer.moe:
            split_size("moe_intermediate_size", layer.moe.intermediate_size, group)
        if layer.moe and layer.moe.shared_size:
            split_size("intermediate_size of the shared expert", layer.moe.shared_size, group)
        if layer.state:
            layer.state.check(tp)
    if stages > 1 and spec.is_encoder:
        raise ValueError(f"--pipeline-parallel-size must be 1 for {spec.architecture}, an encoder")
    stage_layers(spec.layers, 0, stages)


def _quantized_dtype(config: Config) -> tuple[torch.dtype, str]:
    quantization = config.model.quantization
    if config.model.dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"--quantization {quantization} supports bfloat16 activations only: omit --dtype {config.model.dtype}"
        )
    return torch.bfloat16, f"required by --quantization {quantization}"


def attention_specs(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    dtype: torch.dtype,
    kv: KVStorage,
    draft: ModelSpec | None = None,
) -> list[AttentionSpec]:
    """Requirements of all layers, and those of a draft model, on attention, without repetitions: layers of one shape
    differ only in their windows.
    """
    tp = config.parallel.tensor_parallel_size
    shapes: dict[tuple[int, ...], list[LayerSpec]] = {}
    for layer in spec.layers + (draft.layers if draft else ()):
        if layer.attends and layer.latent is None and layer.mixer != "bidirectional":
            shape = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, False, False
            shapes.setdefault(shape, []).append(layer)
        if layer.latent is not None:  # absorbed and expanded, see layers/mla.py
            absorbed = layer.num_heads, 1, layer.latent.width, layer.latent.rank, True, False
            expanded = layer.num_heads, layer.num_heads, layer.head_dim, layer.v_head_dim, False, True
            for shape in (absorbed, expanded):
                shapes.setdefault(shape, []).append(layer)
    return [
        AttentionSpec(
            max(1, heads // tp),
            max(1, kv_heads // tp),
            head_dim,
            dtype,
            platform.device,
            config.cache.block_size,
            uses_sliding_window=any(layer.window for layer in layers),
            uses_soft_cap=any(layer.soft_cap for layer in layers),
            v_head_dim=v_head_dim,
            uses_sinks=any(layer.sinks for layer in layers),
            latent=latent,
            expanded=expanded,
            kv_dtype=dtype if expanded else kv.dtype,  # temporary keys and values have the type of the activations
            kv_scales=None if expanded else kv.scales,
        )
        for (heads, kv_heads, head_dim, v_head_dim, latent, expanded), layers in shapes.items()
    ]


def _check_chunks(spec: ModelSpec, block_size: int) -> None:
    """Raise ValueError unless chunks of attention begin with a block."""
    for size in {layer.chunk for layer in spec.layers} - {None}:
        if size % block_size:
            raise ValueError(
                f"--block-size {block_size} must divide the attention_chunk_size {size} of {spec.architecture}"
            )


def _requested_model_len(requested: str, spec: ModelSpec) -> tuple[int, bool]:
    """Return (maximum number of tokens, whether memory may lower it)."""
    most, why = spec.max_model_len, f" ({spec.why_shorter})" if spec.why_shorter else ""
    if requested == "auto":
        return most, True
    if not requested.isdigit() or int(requested) == 0:
        raise ValueError(f"--max-model-len {requested!r} must be a positive number of tokens, or auto")
    if int(requested) > most:
        raise ValueError(
            f"--max-model-len {requested} is more than this model's {most} tokens{why}: set it to at most {most}, or "
            "auto"
        )
    return int(requested), False


def _whole_prompts(config: Config, model_len: int, num_tokens: int, auto: bool) -> tuple[int, int]:
    """Return (maximum length, default number of tokens of a step) of an encoder, whose prompts must fit into a step."""
    most = config.scheduler.max_num_batched_tokens
    if most is None:
        return model_len, max(num_tokens, model_len)
    if most < model_len and not auto:
        raise ValueError(
            f"--max-num-batched-tokens {most}: an encoder computes a prompt in one step; set it to at least the "
            f"{model_len} tokens of --max-model-len, or --max-model-len to auto"
        )
    return min(model_len, most), num_tokens


def _kv_cache_bytes(
    config: Config, limits: Limits, block: int, state: int, blocks: int, free: int, left: int, need: str
) -> tuple[int, list[Choice]]:
    """Return (bytes of blocks and states, choices). `blocks` bytes would do for the blocks of `need`.

    `free` is the memory that the utilization leaves to the cache, `left` the device's memory minus weights and
    activations.
    """
    requested, states = config.cache.kv_cache_memory_bytes, _MOST_PER_REQUEST * limits.max_num_seqs * state
    if requested is not None:
        if requested > left:
            raise ValueError(
                f"--kv-cache-memory-bytes {requested} ({_size(requested)}) is more than weights and activations "
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
                _size(most),
                f"at most, as it fills: {need}; --kv-cache-memory-bytes sets another size",
            )
        ]
    return free, [
        (
            "KV cache",
            _size(free // block * block if block else free),
            f"gpu_memory_utilization {config.cache.gpu_memory_utilization:g} minus weights and activations",
        )
    ] if free > 0 else []


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.1f} MiB"
