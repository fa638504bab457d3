"""Fourth stage of a start: the KV cache and the runner of steps over it."""

from __future__ import annotations

from quire.worker.batch.request_table import RequestTable
from quire.worker.cache import allocation as kv_cache
from quire.worker.check_ranks import CheckedSampler
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel import tp
from quire.worker.sampling.sampler import Sampler
from quire.worker.startup.load import Loaded
from quire.worker.startup.resolve import Resolved


def build(
    resolved: Resolved,
    loaded: Loaded,
    num_blocks: int,
    num_states: int,
    max_model_len: int,
    num_spares: int = 0,
    check_ranks: bool = False,
) -> ModelRunner:
    """Allocate the KV cache, with `num_spares` of the `num_states` pages for states between drafts, and the request
    table, and build the model runner. With `check_ranks` ranks compare the tokens that they sample.
    """
    model, draft, limits, cache = loaded.model, loaded.draft, resolved.limits, resolved.cache
    platform, block_size = resolved.platform, limits.attention.block_size
    layers = kv_cache.attention_layers(model) + (kv_cache.attention_layers(draft) if draft else [])
    kv_cache.allocate(layers, cache, num_blocks, block_size, limits.kv, platform)
    kv_cache.allocate_states(kv_cache.state_layers(model), cache, num_states, platform)
    table = RequestTable(
        limits.max_num_seqs, max_model_len, block_size, resolved.spec.vocab_size, platform, cache.groups, num_blocks
    )
    return ModelRunner(
        model,
        table,
        limits.attention.backend,
        platform,
        limits.max_num_batched_tokens,
        loaded.stage,
        CheckedSampler(table, platform, tp()) if check_ranks else Sampler(table, platform),
        limits.speculation if limits.speculation.is_on else None,
        loaded.adapters,
        draft,
        num_spares,
    )
