"""Runs the engine loop over a real worker in this process, without sockets: requests in, outputs out.

With the environment variable FORCED_DRAFTS steps verify drafts, 4 of each request, so that any test can be run with
them: "auto" (grammar, lookup and prediction heads), "ngram" or another method, "draft_model" (every model drafts for
itself). Tests of models that have no such drafter are skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field

import pytest

from quire.configs.config import Config
from quire.engine.executor.base import get_executor, steps_in_flight
from quire.engine.messages import (
    AddRequest,
    Choice,
    LoraUse,
    MediaItem,
    PoolingParams,
    SamplingParams,
    TokenLogprobs,
    Transfer,
)
from quire.engine.startup import make_scheduler
from quire.worker.messages import WorkerReady

FORCED_DRAFTS = os.environ.get("FORCED_DRAFTS")


@dataclass
class Result:
    """Collects the outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    pooled: bytes | None = None
    sent: Transfer | None = None


def forced_drafts(folder: str) -> dict[str, str]:
    """Return the `speculative_config` of all engines without their own."""
    if not FORCED_DRAFTS:
        return {}
    drafter = {"model": folder} if FORCED_DRAFTS == "draft_model" else {}
    return {"speculative_config": json.dumps({"method": FORCED_DRAFTS, "num_speculative_tokens": 4, **drafter})}


class InProcessEngine:
    """Runs requests on the model in a folder: `InProcessEngine(folder, max_num_seqs=4)`; settings are fields of
    `Config`.
    """

    cache_salt: str | None = None  # of all requests

    def __init__(self, folder: str, **settings):
        forced = forced_drafts(folder) if "speculative_config" not in settings else {}
        self.config = Config.from_flat(**{"model": folder, "device": "cpu", **forced, **settings})
        self.executor = get_executor(self.config)
        try:
            ready = self.executor.initialize(lambda phase, fraction: None)
        except ValueError as error:
            if not forced or "--speculative-config" not in str(error):
                raise
            pytest.skip(str(error))
        self.use(ready)

    def use(self, ready: WorkerReady) -> None:
        """Start with an empty cache of the sizes that the workers found."""
        self.ready = ready
        self.depth = steps_in_flight(self.config, self.ready)
        self.scheduler = make_scheduler(self.config, ready, self.executor)

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        outputs: list[list[int]] | None = None,
        media: list[list[MediaItem]] | None = None,
        n: int = 1,
        adapters: list[list[LoraUse]] | None = None,
        turn_start: int = 0,
        pooling: list[PoolingParams | None] | None = None,
        transfers: list[Transfer] | None = None,
    ) -> list[Result]:
        """Run all prompts at once until they finish. `outputs` are tokens from before a resubmission, `media` the
        images of each prompt, `adapters` its LoRA adapters, `pooling` its vector, `transfers` its blocks on other
        servers. Each prompt has `n` choices, whose seeds follow one another.
        """
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        ids = [[str(i), *(f"{i}.{k}" for k in range(1, n))] for i in range(len(prompts))]
        results = {one: Result() for choices in ids for one in choices}
        for i, (prompt, one) in enumerate(zip(prompts, params)):
            early = self.scheduler.add(
                AddRequest(
                    str(i),
                    prompt,
                    one,
                    output_token_ids=outputs[i] if outputs else [],
                    media=media[i] if media else [],
                    adapters=adapters[i] if adapters else [],
                    siblings=[Choice(one, params[i].seed + k) for k, one in enumerate(ids[i]) if k],
                    turn_start=turn_start,
                    pooling=pooling[i] if pooling else None,
                    cache_salt=self.cache_salt,
                    transfer=transfers[i] if transfers else None,
                )
            )
            if early:
                self._collect(results, early)
        in_flight: deque = deque()
        while self.scheduler.requests or in_flight:
            if len(in_flight) < self.depth and (step := self.scheduler.schedule()):
                in_flight.append((step, self.executor.execute(step.input)))
                if len(in_flight) < self.depth:
                    continue
            if not in_flight and self.scheduler.tiers is not None and self.scheduler.tiers.busy:
                time.sleep(0.001)
                continue
            assert in_flight, "requests are left, but nothing can be scheduled"
            step, future = in_flight.popleft()
            for batch in self.scheduler.update(step, future.result()).values():
                self._collect(results, batch)
        while self.scheduler.transfers is not None and self.scheduler.transfers.busy:
            self.scheduler.transfers.poll()
        assert self.scheduler.kv.usage == 0, "blocks leaked"
        return list(results.values())

    def _collect(self, results, outputs) -> None:
        for output in outputs:
            result = results[output.request_id]
            assert result.finish_reason is None, "an output after the last"
            result.token_ids += output.new_token_ids
            result.pooled, result.sent = output.pooled, output.sent
            result.logprobs += output.logprobs or []
            result.prompt_logprobs += output.prompt_logprobs or []
            result.finish_reason, result.stop_reason, result.error = (
                output.finish_reason,
                output.stop_reason,
                output.error,
            )
            result.num_cached_tokens = max(result.num_cached_tokens, output.counts.cached)
            if output.timing:
                result.num_preemptions = output.timing.num_preemptions

    def close(self) -> None:
        self.executor.shutdown()
