"""Limits that are fixed before weights are loaded: dtype, attention, context length, and the sizes of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.checkpoints.early import longer_than_model
from quire.configs.config import Config
from quire.worker.attention.base import AttentionSpec
from quire.worker.attention.registry import Selection, select_backend
from quire.worker.cache.storage import KVStorage, resolve_storage
from quire.worker.encoder_dtype import resolve_encoder_dtype
from quire.worker.layers.linear import split_kv_heads
from quire.worker.parallel import Group, split_size
from quire.worker.platforms.base import Platform
from quire.worker.sampling.speculation.choice import Speculation, resolve_speculation
from quire.worker.sampling.speculation.draft_spec import read_draft_spec, read_eagle_spec
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.transformer.decoder import stage_layers

Choice = tuple[str, str, str]  # setting, value, reason

_WHOLE = 8192  # tokens of the longest prompt that is computed in one step unless a setting says more


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
    draft: ModelSpec | None  # for a draft model or an EAGLE-3 head
    choices: list[Choice]

    def with_drafts(self, spec: ModelSpec) -> ModelSpec:
        """Return the model's spec with the parts that only drafting needs."""
        captures = tuple(self.draft.raw["captured"]) if self.speculation.eagle else ()
        spec = replace(spec, has_head=self.speculation.heads > 0, captures=captures)
        if not spec.has_head:
            return spec
        return replace(spec, mtp=replace(spec.mtp, count=min(self.speculation.heads, self.speculation.max_drafts)))


def resolve_limits(config: Config, spec: ModelSpec, platform: Platform) -> Limits:
    """Resolve dtype, attention backend and the sizes of a step.

    Raises ValueError for settings that do not fit the model or the device.
    """
    choices: list[Choice] = []
    tp, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    check_settings(config, spec)
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
    speculation, choice = resolve_speculation(config, spec, deterministic)
    choices.append(choice)
    read_draft = read_eagle_spec if speculation.eagle else read_draft_spec
    draft = read_draft(config, spec, speculation.model) if speculation.model else None
    order = (platform.fixed_attention,) if deterministic else platform.attention_order
    specs = attention_specs(config, spec, platform, dtype, kv, draft)
    attention = select_backend(order, specs, config.device.attention_backend)
    if not specs and config.cache.block_size:  # a block is the spacing of state checkpoints
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
        fitting, num_tokens = _whole_prompts(config, model_len, num_tokens, auto)
        if fitting < model_len:
            reason = f"an encoder computes a prompt in one step; the model's maximum is {model_len}"
            choices.append(("max_model_len", str(fitting), reason))
            model_len, auto = fitting, False
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


def check_settings(config: Config, spec: ModelSpec) -> None:
    """Raise ValueError for settings that do not fit config.json, whatever the device. Each rank checks before it waits
    for the others.
    """
    parallel = config.parallel
    if spec.implementation == "transformers":
        _check_one_rank(spec, config)
    _check_divisible(
        spec, parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel
    )
    model_len, auto = _requested_model_len(config.model.max_model_len, spec)
    if spec.is_encoder:
        _whole_prompts(config, model_len, 0, auto)
    if config.model.quantization:
        _quantized_dtype(config)
    hears = spec.vision is not None and spec.vision.audio
    if config.lora.enabled and (spec.is_encoder or spec.crosses or hears):
        what = "is an encoder" if spec.is_encoder else "transcribes audio"
        raise ValueError(f"LoRA adapters are for models that generate text, and this model {what}")


def attention_specs(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    dtype: torch.dtype,
    kv: KVStorage,
    draft: ModelSpec | None = None,
) -> list[AttentionSpec]:
    """Return the attention requirements of all layers, a draft model's included, without duplicates: layers of one
    shape differ only in their windows.
    """
    tp = config.parallel.tensor_parallel_size
    shapes: dict[tuple[int, ...], list[LayerSpec]] = {}
    for layer in spec.layers + (draft.layers if draft else ()):
        plain = layer.latent is None and layer.compressed is None  # layers/sparse/compressed.py attends by itself
        if layer.attends and plain and layer.mixer != "bidirectional":
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
            uses_bias=any(layer.bias_extent for layer in layers),
            latent=latent,
            expanded=expanded,
            kv_dtype=dtype if expanded else kv.dtype,  # temporary keys and values have the type of the activations
            kv_scales=None if expanded else kv.scales,
        )
        for (heads, kv_heads, head_dim, v_head_dim, latent, expanded), layers in shapes.items()
    ]


def _check_one_rank(spec: ModelSpec, config: Config) -> None:
    parallel = config.parallel
    for size, flag in (
        (parallel.tensor_parallel_size, "--tensor-parallel-size"),
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size"),
    ):
        if size > 1:
            raise ValueError(
                f"{flag} {size} does not work with models that transformers computes, and quire has no "
                f"implementation of {spec.architecture} of its own: leave it at 1"
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
        if layer.compressed:
            split_size("o_groups", layer.compressed.groups, group)
        if layer.mlp not in ("moe", "none"):
            split_size("intermediate_size", layer.intermediate_size, group)
        if layer.moe and expert_parallel:
            split_size("the number of experts", layer.moe.routing.num_experts, group)
        elif layer.moe:
            split_size("moe_intermediate_size", layer.moe.intermediate_size, group)
        if layer.moe and layer.moe.shared_size:
            split_size("intermediate_size of the shared expert", layer.moe.shared_size, group)
        if layer.state:
            layer.state.check(tp)
    if stages > 1 and (spec.is_encoder or spec.crosses):
        what = "an encoder" if spec.is_encoder else "whose layers all attend to the output of its encoder"
        raise ValueError(f"--pipeline-parallel-size must be 1 for {spec.architecture}, {what}")
    stage_layers(spec.layers, 0, stages)


def _quantized_dtype(config: Config) -> tuple[torch.dtype, str]:
    quantization = config.model.quantization
    if config.model.dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"--quantization {quantization} supports bfloat16 activations only: omit --dtype {config.model.dtype}"
        )
    return torch.bfloat16, f"required by --quantization {quantization}"


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
        raise ValueError(longer_than_model(requested, most, why))
    return int(requested), False


def _whole_prompts(config: Config, model_len: int, num_tokens: int, auto: bool) -> tuple[int, int]:
    """Return (maximum length, default number of tokens of a step) of an encoder, whose prompts must fit into a step."""
    most = config.scheduler.max_num_batched_tokens
    if most is None:
        if auto:
            model_len = min(model_len, max(num_tokens, _WHOLE))
        return model_len, max(num_tokens, model_len)
    if most < model_len and not auto:
        raise ValueError(
            f"--max-num-batched-tokens {most}: an encoder computes a prompt in one step; set it to at least the "
            f"{model_len} tokens of --max-model-len, or --max-model-len to auto"
        )
    return min(model_len, most), num_tokens


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
