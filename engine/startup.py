"""The start of the engine: from the workers' sizes to a scheduler that has run its first request."""

from __future__ import annotations

from quire.configs.config import Config
from quire.engine.executor.base import Executor
from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.tiers import tiers_below
from quire.engine.kv.transfers import Transfers
from quire.engine.messages import AddRequest, PoolingParams, SamplingParams, WorkerReady
from quire.engine.scheduler import Scheduler


def make_scheduler(config: Config, ready: WorkerReady, executor: Executor) -> Scheduler:
    """Return a scheduler with an empty cache, the tiers below it and the transfers to other servers."""
    kv = KVCacheManager(
        ready.num_blocks,
        ready.block_size,
        config.cache.enable_prefix_caching and not (ready.pooling and ready.pooling.whole_prompts),
        ready.groups,
        ready.max_num_batched_tokens,
        bool(ready.media and ready.media.whole),
        ready.num_states,
    )
    tiers = tiers_below(kv, ready, executor.tiers)
    scheduler = Scheduler(config.scheduler, ready, kv, config.parallel.pipeline_parallel_size, tiers)
    if ready.has_transfers and tiers is not None:
        scheduler.transfers = Transfers(kv, executor.transfers, config.cache.transfer)
    return scheduler


def warm_up(scheduler: Scheduler, executor: Executor) -> None:
    """Run one short request, prefill and, if the model generates, decode, then clear the prefix cache and the counts.

    Raises RuntimeError if it fails.
    """
    prompt = [0] * min(4, max(scheduler.max_model_len - 2, 1))
    sampling, pooling = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True), None
    if (info := scheduler.pooling) and not info.generates:
        sampling, pooling = SamplingParams(max_tokens=0), PoolingParams(info.tasks[0])
    scheduler.add(AddRequest("warm-up", prompt, sampling, pooling=pooling))
    while step := scheduler.schedule():
        for output in scheduler.update(step, executor.execute(step.input).result()).get(b"", []):
            if output.error:
                raise RuntimeError(f"the warm-up step failed: {output.error}")
    scheduler.kv.reset_prefix_cache()
    scheduler.flush_stats()
