"""The start of the engine: from the workers' sizes to a scheduler that has run its first request."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.configs.config import Config
from quire.engine.executor.base import Executor
from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.tiers import tiers_below
from quire.engine.kv.transfers import Transfers
from quire.engine.messages import (
    SAMPLERS,
    AddRequest,
    Dry,
    EngineOutput,
    LoraUse,
    NoRepeatNgram,
    PoolingInfo,
    PoolingParams,
    SamplerChain,
    SamplingParams,
    WorkerReady,
)
from quire.engine.scheduler import Scheduler

_MOST_ROWS = 1024  # rows of logits: no kernel differs above


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


def warm_up(
    scheduler: Scheduler,
    executor: Executor,
    compiles_at_use: bool = False,
    report: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Run one short request: prefill and, if the model generates, decode. On a device that compiles at first use, run
    requests of every kind, too. Then clear the prefix cache, the counts and the measured durations. `report` is called
    between runs with the fraction done.

    Raises RuntimeError if a request fails.
    """
    info = scheduler.pooling
    if info and not info.generates:
        kind = _Kind(SamplingParams(max_tokens=0), pooling=PoolingParams(info.tasks[0]))
    else:
        kind = _Kind(SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True))
    most = max(scheduler.max_model_len - 2, 1)
    _run(scheduler, executor, [(min(4, most), kind)])
    hears = scheduler.media is not None and scheduler.media.cross  # every request has audio
    if compiles_at_use and not hears:
        adapters = executor.workers.prepare_warm_up()
        runs = _runs(scheduler, most, kind, [kind, *_kinds(info, adapters)])
        for i, (requests, together) in enumerate(runs, 1):
            report(i / (len(runs) + 1))
            _run(scheduler, executor, requests, together)
        for key in adapters:
            executor.workers.unload_lora(key)
    scheduler.budget.forget_measured()
    if scheduler.tiers is not None:
        scheduler.tiers.forget_measured()
    scheduler.flush_stats()
    report(1.0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The parameters of a warm-up request."""

    sampling: SamplingParams
    adapters: list[str] = field(default_factory=list)
    pooling: PoolingParams | None = None


_Requests = list[tuple[int, _Kind]]  # (tokens of the prompt, kind)


def _runs(scheduler: Scheduler, most: int, first: _Kind, kinds: list[_Kind]) -> list[tuple[_Requests, bool]]:
    """Return (requests, whether they arrive together) for runs of every size and kind."""
    sizes = _sizes(most, scheduler.token_budget)
    runs: list[_Requests] = [[(size, first)] for size in sizes]
    runs.append([(1, first), (sizes[-1], first)])  # a decode next to a prompt
    runs += [[(min(size, most), kind)] for kind in kinds for size in (20, 7)]
    scored = first if scheduler.pooling else _Kind(SamplingParams(max_tokens=2, prompt_logprobs=0))
    many = [[(min(2, most), first)] * count for count in _powers(min(scheduler.max_running, _MOST_ROWS))]
    rows = [[(size, scored)] for size in _powers(min(most, scheduler.token_budget, _MOST_ROWS))]
    return [*((run, False) for run in runs), *((run, True) for run in many), *((run, False) for run in rows)]


def _sizes(most: int, budget: int) -> list[int]:
    """Return prompt lengths in tokens: powers of 2, the most that a step takes, and one that takes several steps."""
    largest = min(most, budget)
    return [*_powers(largest), largest, *([min(most, 3 * budget // 2)] * (most > budget))]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _kinds(info: PoolingInfo | None, adapters: list[str]) -> list[_Kind]:
    """Return kinds of requests that together use every operation that a device runs for one."""
    pooled = [_Kind(SamplingParams(max_tokens=0), pooling=PoolingParams(task)) for task in (info.tasks if info else ())]
    if info and not info.generates:
        return pooled
    base = SamplingParams(max_tokens=4, ignore_eos=True)
    greedy, chain = {"temperature": 0.0}, SamplerChain(SAMPLERS, typical_p=0.9, dry=Dry(0.8))
    kinds = [_Kind(msgspec.structs.replace(base, **each)) for each in (
        greedy, {}, {"top_k": 3}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1, "top_p": 0.9},
        {"repetition_penalty": 1.1, "repeat_last_n": 8} | greedy, {"logit_bias": {0: 1.0}}, {"bad_words_ids": [[0, 0]]},
        {"allowed_token_ids": [0], "min_tokens": 1, "stop_token_ids": [1]}, {"no_repeat_ngram": NoRepeatNgram(3, 64)},
        {"logprobs": 0}, {"logprobs": 2} | greedy, {"logprobs": 2, "logprobs_mode": "processed_logits", "top_p": 0.9},
        {"prompt_logprobs": 1} | greedy, {"prediction": [0] * 8} | greedy, {"chain": chain},
        {"chain": SamplerChain(SAMPLERS, mirostat=2)},
    )]  # fmt: skip
    kinds += [_Kind(msgspec.structs.replace(base, temperature=0.0), adapters[: i + 1]) for i in range(len(adapters))]
    return kinds + pooled


def _run(scheduler: Scheduler, executor: Executor, requests: _Requests, together: bool = False) -> None:
    """Run requests that arrive one per step or `together`, with an empty prefix cache.

    Each has its own salt: lower tiers have no blocks for it from an earlier start, and take none of its blocks.
    """
    for i, (size, kind) in enumerate(requests):
        uses = [LoraUse(key, "") for key in kind.adapters]
        salt = secrets.token_hex(16)
        message = AddRequest(
            f"warm-up {i}", [0] * size, kind.sampling, cache_salt=salt, pooling=kind.pooling, adapters=uses
        )
        _check(scheduler.add(message))
        if not together:
            _step(scheduler, executor)
    while _step(scheduler, executor):
        pass
    if scheduler.requests:
        raise RuntimeError("a request of the warm-up did not end")
    scheduler.kv.reset_prefix_cache()


def _step(scheduler: Scheduler, executor: Executor) -> bool:
    """Run a step. Returns False if there is none to run."""
    step = scheduler.schedule()
    if step is not None:
        _check(scheduler.update(step, executor.execute(step.input).result()).get(b"", []))
    return step is not None


def _check(outputs: list[EngineOutput]) -> None:
    for output in outputs:
        if output.error:
            raise RuntimeError(f"the warm-up step failed: {output.error}")
