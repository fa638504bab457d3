"""Builds a model runner over a KV cache, and measures on a small one the memory of the largest step."""

from __future__ import annotations

import msgspec

from quire.worker.batch.request_table import RequestTable
from quire.worker.cache import allocation as kv_cache
from quire.worker.check_ranks import CheckedSampler
from quire.worker.limits import Limits
from quire.worker.lora.adapters import Adapters
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel import tp
from quire.worker.pipeline import SingleStage
from quire.worker.platforms.base import Platform
from quire.worker.sampling.sampler import Sampler
from quire.worker.spec.cache import CachePlan
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import CausalLM

_MEASURED_LOGPROBS = 20  # log-probabilities per token when memory is measured: the default of --max-logprobs


def make_runner(
    model: CausalLM,
    spec: ModelSpec,
    platform: Platform,
    limits: Limits,
    cache: CachePlan,
    num_blocks: int,
    num_states: int,
    max_model_len: int,
    stage: SingleStage,
    check_ranks: bool = False,
    adapters: Adapters | None = None,
    draft: CausalLM | None = None,
    num_spares: int = 0,
) -> ModelRunner:
    """Allocate the KV cache and the request table, and build the model runner."""
    block_size = limits.attention.block_size
    layers = kv_cache.attention_layers(model) + (kv_cache.attention_layers(draft) if draft else [])
    kv_cache.allocate(layers, cache, num_blocks, block_size, limits.kv, platform.device)
    kv_cache.allocate_states(kv_cache.state_layers(model), cache, num_states, platform.device)
    table = RequestTable(
        limits.max_num_seqs, max_model_len, block_size, spec.vocab_size, platform, cache.groups, num_blocks
    )
    sampler = CheckedSampler(table, platform, tp()) if check_ranks else Sampler(table, platform)
    return ModelRunner(
        model,
        table,
        limits.attention.backend,
        platform,
        limits.max_num_batched_tokens,
        stage,
        sampler,
        limits.speculation if limits.speculation.is_on else None,
        adapters,
        draft,
        num_spares,
    )


def measure_activations(
    model: CausalLM, spec: ModelSpec, platform: Platform, limits: Limits, cache: CachePlan, stage: SingleStage
) -> int:
    """Bytes of device memory that the largest step needs in addition to weights and KV cache, measured by running it
    over a cache of a few blocks: with as many requests as possible and, if layers have states, with as few as possible,
    because kernels of states keep something per chunk of a long prompt.
    """
    most = limits.max_num_batched_tokens
    largest = min(limits.max_num_seqs, most)
    counts = {largest}
    if any(group.kind == "state" for group in cache.groups):
        counts.add(min(-(-most // limits.max_model_len), largest))
    return max(_measure(model, spec, platform, limits, cache, stage, _lengths(limits, count)) for count in counts)


def _lengths(limits: Limits, num_reqs: int) -> list[int]:
    most, rest = divmod(limits.max_num_batched_tokens, num_reqs)
    return [min(most + (i < rest), limits.max_model_len) for i in range(num_reqs)]


def _measure(
    model: CausalLM,
    spec: ModelSpec,
    platform: Platform,
    limits: Limits,
    cache: CachePlan,
    stage: SingleStage,
    lengths: list[int],
) -> int:
    """The bytes of a step with prompts of `lengths` tokens.

    All requests share the same blocks, so the results are meaningless. Every row samples in the way that takes the most
    memory: at random, with penalties, and with raw log-probabilities, which need a copy of the logits. One request
    scores its prompt, so that the hidden states of all tokens are kept.
    """
    num_reqs = len(lengths)
    blocks = list(range(1, -(-max(lengths) // limits.attention.block_size) + 1))
    num_logprobs = min(_MEASURED_LOGPROBS, spec.vocab_size)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=num_logprobs
    )
    scoring = msgspec.structs.replace(sampling, prompt_logprobs=num_logprobs)
    samples = list(range(num_reqs)) if spec.has_lm_head else []
    new = [
        NewRequest(
            i,
            [0] * length,
            length,
            [
                [0, len(blocks) + 1] if group.kind == "state" else blocks[: -(-length // limits.attention.block_size)]
                for group in cache.groups
            ],
            sampling if i or not samples else scoring,
        )
        for i, length in enumerate(lengths)
    ]
    step = StepInput(0, new, list(range(num_reqs)), [0] * num_reqs, lengths, [[] for _ in new], samples)
    platform.release_memory()
    before, _ = platform.memory_in_use()
    runner = make_runner(model, spec, platform, limits, cache, len(blocks) + 1, 1, limits.max_model_len, stage)
    cache_bytes = (len(blocks) + 1) * cache.page_bytes(
        limits.attention.block_size, [layer.layer_index for layer in kv_cache.attention_layers(model)]
    ) + 2 * cache.state_bytes([layer.layer_index for layer in kv_cache.state_layers(model)])
    runner.execute(step).result()
    stage.finish(runner.table)
    _, peak = platform.memory_in_use()
    for layer in kv_cache.attention_layers(model):
        layer.k_cache = layer.v_cache = None
    for layer in kv_cache.state_layers(model):
        layer.pages = None
    del runner
    platform.release_memory()
    return max(peak - before - cache_bytes, 0)
