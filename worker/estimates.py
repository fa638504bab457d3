"""Bytes that weights, activations, images, adapters and CUDA graphs need, estimated from config.json."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.configs.config import Config
from quire.worker.batch.graphs import padded_sizes
from quire.worker.batch.piece_sizes import piece_sizes
from quire.worker.layers.lora import StepLora
from quire.worker.layers.mla import EXPANDED_BYTES
from quire.worker.limits import Limits, attention_specs
from quire.worker.lora.adapters import LoraLimits
from quire.worker.lora.targets import Targets
from quire.worker.messages import MediaInfo
from quire.worker.models.registry import build_model, encoder_bytes_per_embed, weight_bytes
from quire.worker.platforms.base import Platform
from quire.worker.platforms.ops import Ops
from quire.worker.sampling.speculation.draft_spec import draft_quantization
from quire.worker.spec.model import ModelSpec, cache_specs
from quire.worker.spec.moe import MoESpec

_LARGEST_IMAGE = 16384  # embeddings: Qwen2-VL's largest, 12.8 million pixels
_KEPT_AUDIO = 16  # pieces of audio whose encoder output is kept, for requests that repeat one


def estimate_weights(
    spec: ModelSpec, dtype: torch.dtype, world_size: int, quantization: str | None = None, ops: Ops | None = None
) -> int:
    """Return bytes of the weights on each rank, estimated before loading; with `quantization`, their quantized size.
    The image encoder is replicated on every rank. `ops` decides which weights stay quantized.
    """
    text = weight_bytes(replace(spec, vision=None), dtype, quantization, ops)
    return text // world_size + weight_bytes(spec, dtype, quantization, ops) - text


def estimate_draft_weights(config: Config, limits: Limits, ops: Ops) -> int:
    """Return bytes of the weights of a draft model."""
    if limits.draft is None:
        return 0
    return weight_bytes(limits.draft, limits.dtype, draft_quantization(config, limits.draft), ops)


def media_info(spec: ModelSpec, limits: Limits, platform: Platform) -> MediaInfo | None:
    """Return which media requests may contain, and how many embeddings are computed and kept."""
    if spec.vision is None:
        return None
    if cross := spec.vision.cross:
        batch = cross * max(1, (platform.encoder_budget or limits.max_num_batched_tokens) // cross)
        heads = [layer.num_heads for layer in spec.layers if layer.cross_length]
        kept = max(cross * min(limits.max_num_seqs, _KEPT_AUDIO), batch)
        return MediaInfo(-1, kept, batch, cross=cross, cross_heads=(len(heads), min(heads)), audio=True)
    size = max(limits.max_num_batched_tokens, min(limits.max_model_len, _LARGEST_IMAGE))
    budget, vision = min(limits.max_num_batched_tokens, platform.encoder_budget or size), spec.vision
    return MediaInfo(
        vision.image_token_id,
        size,
        budget,
        vision.bidirectional,
        vision.mrope,
        audio=vision.audio,
        video_token_id=vision.video_token_id,
    )


def estimate_images(spec: ModelSpec, limits: Limits, platform: Platform) -> int:
    """Return bytes of the cached embeddings, and of encoding the largest batch or the largest image."""
    media = media_info(spec, limits, platform)
    if media is None:
        return 0
    kept = spec.vision.width(spec.hidden_size) * limits.dtype.itemsize
    largest = media.encoder_budget if media.cross else media.cache_size
    return media.cache_size * kept + largest * encoder_bytes_per_embed(spec, limits.dtype)


def estimate_activations(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Return bytes that the largest step needs in addition to weights and KV cache: the model's need or the draft
    model's, whichever is larger.
    """
    specs = (spec,) if limits.draft is None else (spec, limits.draft)
    return max(_activations(one, limits, tp) for one in specs)


def _activations(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Return bytes that the largest step of a model needs: the widest layer, the logits, gathered keys and values, and
    tables.

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
    """Return bytes of temporary memory that the attention backend allocates for steps of the largest batch."""
    specs = attention_specs(config, spec, platform, limits.dtype, limits.kv, limits.draft)
    workspace = limits.attention.backend.workspace
    return max((workspace(one, limits.max_num_seqs, limits.max_model_len) for one in specs), default=0)


def estimate_graphs(config: Config, spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Return bytes that CUDA graphs need once all sizes are recorded (twice each with LoRA): their results, one
    set of activations (they share a pool, which fragments), workspaces, and the driver's memory per graph.
    """
    sizes = padded_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens))
    sizes += piece_sizes(spec, limits.max_num_batched_tokens, tp)
    results = sum(sizes) * spec.hidden_size * limits.dtype.itemsize + len(sizes) * (12 << 20)
    layer = 2 * max(sizes) * _layer_bytes(spec, limits, tp)
    return results * (2 if config.lora.enabled else 1) + layer + (128 << 20)


def _layer_bytes(spec: ModelSpec, limits: Limits, tp: int) -> int:
    """Return bytes that one token needs inside the widest layer."""
    widest = max(3 * (layer.num_heads * layer.head_dim + layer.intermediate_size) // tp for layer in spec.layers)
    experts = max(_expert_bytes(layer.moe, spec.hidden_size, limits.dtype.itemsize) for layer in spec.layers)
    layer = limits.dtype.itemsize * (4 * spec.hidden_size + 2 * _kv_width(spec, tp) + widest)
    return layer + 8 * spec.hidden_size + experts


def _expert_bytes(moe: MoESpec | None, hidden_size: int, itemsize: int) -> int:
    """Return bytes that one token needs for its experts: their inputs and activations, and results in float32."""
    return moe.routing.top_k * (itemsize * (hidden_size + 3 * moe.intermediate_size) + 4 * hidden_size) if moe else 0


def _kv_width(spec: ModelSpec, tp: int) -> int:
    """Return the most entries that one token's keys and values have in a layer, on each of `tp` ranks."""
    return max((cache.page_bytes(1) for cache in cache_specs(spec, 1, tp) if cache), default=0)


def estimate_adapters(spec: ModelSpec, lora: LoraLimits | None, num_ranks: int, ops: Ops) -> int:
    """Return bytes, per rank, of the maximum number of LoRA adapters, each of the largest LoRA rank. Raises ValueError.
    """
    if lora is None:
        return 0
    model = build_model(spec, torch.float32, torch.device("meta"))
    return lora.num_bytes(Targets(model, StepLora()), ops.adapter_copies) // num_ranks


def uses_graphs(config: Config, spec: ModelSpec, limits: Limits, platform: Platform) -> bool:
    """Return whether steps will be recorded: the device and the attention backend support it, there is one pipeline
    stage, the model is ours (transformers' code may wait for the device), and --enforce-eager is off. Attention with a
    window of the output, to compressed keys or to chosen ones, is not recorded either. Nor are experts that differ in
    form, which only the loaded model shows: they are multiplied one by one, and the host waits for the list of those
    that have tokens.
    """
    return (
        platform.has_graphs
        and spec.implementation == "quire"
        and not spec.is_encoder
        and not any(layer.output_window or layer.compressed or layer.index for layer in spec.layers)
        and limits.attention.backend.graph_safe
        and config.parallel.pipeline_parallel_size == 1
        and not config.device.enforce_eager
    )
