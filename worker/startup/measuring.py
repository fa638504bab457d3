"""Measure the memory of the largest step, over a small KV cache."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from quire.worker.cache import allocation as kv_cache
from quire.worker.limits import Limits
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from quire.worker.startup.build import build
from quire.worker.startup.load import Loaded
from quire.worker.startup.resolve import Resolved

_MEASURED_LOGPROBS = 20  # log-probabilities per token when memory is measured: the default of --max-logprobs


def measure_activations(resolved: Resolved, loaded: Loaded) -> int:
    """Return bytes of device memory that the largest step needs in addition to weights and KV cache, measured by
    running it over a cache of a few blocks: with as many requests as possible and, if layers have states, with as few
    as possible, because kernels of states keep something per chunk of a long prompt.
    """
    limits, most = resolved.limits, resolved.limits.max_num_batched_tokens
    largest = min(limits.max_num_seqs, most)
    counts = {largest}
    if any(group.kind == "state" for group in resolved.cache.groups):
        counts.add(min(-(-most // limits.max_model_len), largest))
    bare = replace(loaded, draft=None, adapters=None)
    return max(_measure(resolved, bare, _lengths(limits, count)) for count in counts)


def _lengths(limits: Limits, num_reqs: int) -> list[int]:
    most, rest = divmod(limits.max_num_batched_tokens, num_reqs)
    return [min(most + (i < rest), limits.max_model_len) for i in range(num_reqs)]


def _measure(resolved: Resolved, loaded: Loaded, lengths: list[int]) -> int:
    """Return the bytes of a step with prompts of `lengths` tokens.

    All requests share the same blocks, so the results are meaningless. Every row samples in the way that takes the most
    memory: at random, with penalties, and with raw log-probabilities, which need a copy of the logits. One request
    scores its prompt, so that the hidden states of all tokens are kept.
    """
    spec, platform, limits, cache = resolved.spec, resolved.platform, resolved.limits, resolved.cache
    block_size, num_reqs = limits.attention.block_size, len(lengths)
    blocks = list(range(1, -(-max(lengths) // block_size) + 1))
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
                [0, len(blocks) + 1] if group.kind == "state" else blocks[: -(-length // block_size)]
                for group in cache.groups
            ],
            sampling if i or not samples else scoring,
        )
        for i, length in enumerate(lengths)
    ]
    step = StepInput(0, new, list(range(num_reqs)), [0] * num_reqs, lengths, [[] for _ in new], samples)
    platform.release_memory()
    before, _ = platform.memory_in_use()
    runner = build(resolved, loaded, len(blocks) + 1, 1, limits.max_model_len)
    attention, states = kv_cache.attention_layers(loaded.model), kv_cache.state_layers(loaded.model)
    cache_bytes = (len(blocks) + 1) * cache.page_bytes(block_size, [layer.layer_index for layer in attention])
    cache_bytes += 2 * cache.state_bytes([layer.layer_index for layer in states])
    runner.execute(step).result()
    loaded.stage.finish(runner.table)
    _, peak = platform.memory_in_use()
    for layer in attention:
        layer.k_cache = layer.v_cache = None
    for layer in states:
        layer.pages = None
    del runner
    platform.release_memory()
    return max(peak - before - cache_bytes, 0)
