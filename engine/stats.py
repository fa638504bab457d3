"""Counters of the scheduler for `/metrics` and the log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quire.engine.messages import EngineStats, TierStats
from quire.engine.request import Request


@dataclass(slots=True)
class Counts:
    """Counts since the last statistics message."""

    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # computed prompt tokens, including those recomputed after a preemption
    num_generation_tokens: int = 0
    iteration_tokens: list[int] = field(default_factory=list)  # tokens of each step
    num_encoded: int = 0  # embeddings of images
    num_drafts: int = 0  # times that a step verified drafts of a request
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted, by position

    external_queries: int = 0  # tokens looked up in lower tiers
    external_hits: int = 0  # tokens loaded from lower tiers
    tiers: TierStats | None = None
    num_ended: int = 0  # requests that ended after they ran, excluding batches

    def count_drafts(self, num_draft: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        accepted = self.accepted_per_position
        accepted += [0] * (num_accepted - len(accepted))
        for i in range(num_accepted):
            accepted[i] += 1

    def count_admission(self, request: Request, reads_cache: bool) -> None:
        """Count a request that is scheduled for the first time, with the tokens that were found in the cache."""
        request.scheduled_time = time.time()
        cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.counts = msgspec.structs.replace(request.counts, cached=cached) if cached else request.counts
        if reads_cache:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += cached

    def count_prefill(self, request: Request, start: int, end: int) -> None:
        """Count prompt tokens [start, end). `num_prefill_computed` counts each token once; the metric also counts
        recomputation.
        """
        self.num_prompt_tokens += end - start
        request.num_prefill_computed = max(request.num_prefill_computed, end - request.counts.cached)

    def snapshot(
        self, num_running: int, num_waiting: int, kv_cache_usage: float, encoder_cache_usage: float
    ) -> EngineStats:
        return EngineStats(
            num_running,
            num_waiting,
            kv_cache_usage,
            self.prefix_cache_queries,
            self.prefix_cache_hits,
            self.num_preemptions,
            self.num_prompt_tokens,
            self.num_generation_tokens,
            self.iteration_tokens,
            self.num_encoded,
            encoder_cache_usage,
            self.num_drafts,
            self.num_draft_tokens,
            self.accepted_per_position,
            external_queries=self.external_queries,
            external_hits=self.external_hits,
            tiers=self.tiers,
            num_ended=self.num_ended,
        )


def with_adapters(stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> EngineStats:
    """Return `stats` with the names of the LoRA adapters that requests use."""
    names = (sorted({use.name for request in queue for use in request.adapters}) for queue in (running, waiting))
    return msgspec.structs.replace(stats, **dict(zip(("running_adapters", "waiting_adapters"), names, strict=True)))
