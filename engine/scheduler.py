"""Who runs in the next step, and what its results mean.

There is no prefill phase and no decode phase: a request has some tokens (`num_tokens`, and `num_in_flight` whose ids
are still on the device), some of them computed, and every step lets `num_computed_tokens` catch up within one token
budget. Prompts in chunks, mixed batches, prefix hits and resuming after preemption are all this one rule.

Only counts are needed to schedule the next step, never a token id. So several steps may be in flight, under four rules:
(a) `num_in_flight` counts sampled but unseen tokens;
(b) length stops are predicted; only EOS, stop ids and aborts overshoot, by at most depth - 1 steps, whose outputs
`update` skips;
(c) a preempted request keeps `num_in_flight`, still receives those tokens, and is admitted again once it reaches 0;
(d) blocks and rows are reusable as soon as they are freed, because the worker runs steps in order.

Blocks are shared before anybody knows whether the step that fills them succeeds. When it fails a request, whoever built
on the blocks that this request filled, in the same step or in later ones that are in flight, is computed again
(`_recompute_dependents`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

from quire.configs.config import SchedulerConfig
from quire.engine.kv.manager import KVCacheManager, Match
from quire.engine.messages import AddRequest, EngineOutput, EngineStats
from quire.engine.request import Request, RequestQueue, Status
from quire.engine.stats import Counts
from quire.engine.validation import check_request
from quire.worker.messages import NewRequest, StepInput, StepOutput, TokenLogprobs, WorkerReady, longest_request

Outputs = dict[bytes, list[EngineOutput]]  # by client
SCORED_CHUNK = 256  # prompt tokens with log-probabilities in a step that others share: each costs a row of logits


@dataclass(slots=True)
class Step:
    """What runs, and whose it is: `requests[i]` is at batch position i of `input`.

    `published` are the blocks that others could find since this step was scheduled: this step or an earlier one fills
    them.
    """

    input: StepInput
    requests: list[Request]
    num_tokens: int = 0
    published: dict[Request, list[int]] = field(default_factory=dict)
    # batch positions whose results are void, because they were computed from blocks of a failed request
    ignored: set[int] = field(default_factory=set)


class Scheduler:
    """The only writer of requests. `schedule` and `update` are called in turn, with up to `depth` steps scheduled
    before the first is updated.

    With several pipeline `stages` the requests that decode form as many groups, which take turns: while the last stage
    computes the next tokens of one group, the first one works on another, whose tokens are known. Prompts need not take
    turns: their tokens are all known.
    """

    def __init__(self, config: SchedulerConfig, ready: WorkerReady, kv: KVCacheManager, stages: int = 1):
        self.kv, self.num_groups, self.turn = kv, stages, 0
        self.by_priority = config.scheduling_policy == "priority"
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.token_budget = ready.max_num_batched_tokens
        # so that no running request is ever left without a token
        self.max_running = min(ready.max_num_seqs, ready.max_num_batched_tokens)
        # so that a request alone always fits
        self.max_model_len = longest_request(
            ready.groups, kv.pool.num_usable, kv.block_size, self.token_budget, ready.max_model_len
        )
        self.vocab_size = ready.vocab_size
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.free_rows = list(range(ready.max_num_seqs))  # a heap: rows are handed out lowest first
        self._in_flight: deque[Step] = deque()  # scheduled and not updated
        self.counts = Counts()
        self._num_added = 0
        self._num_steps = 0

    # ---- requests come and go

    def add(self, message: AddRequest, client: bytes = b"") -> list[EngineOutput]:
        """Queue the choices of a request. Returns the only outputs of those that need no step (resubmissions that were
        complete already).

        Raises ValueError for what can never run, and then adds none of them. Everything in a message that could fail is
        used here, so that `schedule` cannot fail for one request.
        """
        choices = message.choices
        for choice in choices:
            if (client, choice.request_id) in self.requests:
                raise ValueError(f"request_id {choice.request_id!r} is already in use")
        check_request(message, self.max_model_len, self.vocab_size)
        first, arrival = self._num_added + 1, time.monotonic() - message.age
        requests = [
            Request(message, choice, client, i, first, arrival, self.max_model_len, self.by_priority)
            for i, choice in enumerate(choices, first)
        ]
        self._num_added += len(requests)
        complete = []
        for request in requests:
            if request.num_output_tokens and (reason := request.finish_reason()):
                stop_reason = request.stop_reason() if reason == "stop" else None
                complete.append(
                    EngineOutput(request.request_id, [], reason, stop_reason, timing=request.timing(time.time()))
                )
            else:
                self.requests[client, request.request_id] = request
                self.waiting.add(request)
        return complete

    def abort(self, request_ids: list[str], client: bytes = b"") -> None:
        """Free these requests at once; unknown and finished ones are ignored.

        Steps in flight that contain them are skipped by `update`.
        """
        for request_id in request_ids:
            if request := self.requests.get((client, request_id)):
                self._remove(request)

    def abort_client(self, client: bytes) -> None:
        """Free all requests of a server that is gone."""
        self.abort([request_id for owner, request_id in self.requests if owner == client], client)

    # ---- a step

    def schedule(self) -> Step | None:
        """Choose what runs in the next step and advance the counters; None if nothing can run."""
        step = Step(StepInput(self._num_steps + 1, [], [], [], [], [], []), [])
        self.kv.start_step()
        if self.by_priority and self.waiting:
            self._make_way()
        for _ in range(self.num_groups):  # until one has something to run
            self.turn = (self.turn + 1) % self.num_groups
            self._schedule_running(step)
            if step.requests:
                break
        self._admit_waiting(step)
        if not step.requests:
            return None
        self._num_steps += 1
        self._in_flight.append(step)
        self.counts.iteration_tokens.append(step.num_tokens)
        return step

    def _schedule_running(self, step: Step) -> None:
        """Decodes first, so that no prompt, however long, delays another request's next token; then prompts with what
        is left of the budget.
        """
        batch: dict[Request, int] = {}  # number of tokens, in batch order
        grown: dict[Request, list[list[int]]] = {}  # blocks added
        budget, prefills = self.token_budget, []
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # preempted by one before it
                continue
            num_tokens = len(request.token_ids) + request.num_in_flight
            num_new = num_tokens - request.num_computed_tokens
            if num_new > 1:
                prefills.append(request)
            elif (
                num_new == 1
                and request.row % self.num_groups == self.turn
                and not (request.num_in_flight and num_tokens >= request.max_total_tokens)
                and self._grow(request, num_tokens, batch, grown)
            ):
                batch[request] = 1
                budget -= 1
        for request in prefills:
            if request.status is Status.RUNNING and budget > 0:
                num_new = self._chunk(request, budget, alone=len(self.running) == 1)
                if self._grow(request, request.num_computed_tokens + num_new, batch, grown):
                    batch[request] = num_new
                    budget -= num_new
        for request, num_new in batch.items():
            self._commit(step, request, num_new, grown.get(request, []))

    def _grow(
        self, request: Request, num_tokens: int, batch: dict[Request, int], grown: dict[Request, list[list[int]]]
    ) -> bool:
        """Give a running request blocks for its first `num_tokens` tokens, if need be from those served after it.
        False: it sits this step out.

        The last one never preempts itself: what it has stays useful until somebody before it needs the blocks. The
        first one always gets what it needs.
        """
        if self.kv.has_room(request, num_tokens):
            return True
        while (block_ids := self.kv.allocate(request, num_tokens)) is None:
            victim = self.running.last
            if victim is request:
                return False
            batch.pop(victim, None)
            self._preempt(victim)
        grown[request] = block_ids
        return True

    def _admit_waiting(self, step: Step) -> None:
        """Admit in order of service while budget, rows and blocks last.

        Nobody overtakes a request that does not fit.
        """
        if not self.waiting:
            return
        reserve = self._reserve()
        while self.waiting and step.num_tokens < self.token_budget and len(self.running) < self.max_running:
            request = self.waiting.first
            if request.num_in_flight or reserve >= self.kv.pool.num_free:  # rule (c); and each needs a block at least
                return
            matched = self.kv.match(request)
            if self.kv.num_missing(request, matched) + reserve > self.kv.pool.num_free:
                return
            self._admit(step, request, matched)
            reserve += self._num_expected_blocks(request)

    def _admit(self, step: Step, request: Request, matched: Match) -> None:
        """Move a request from waiting to running, with a row, the blocks of its cached prefix, and its first chunk."""
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.row = heappop(self.free_rows)
        self.kv.attach(request, matched)
        if request.num_cached_tokens < 0:
            self._note_first_scheduling(request)
        num_new = self._chunk(request, self.token_budget - step.num_tokens, alone=not self.running)
        block_ids = self.kv.allocate(request, request.num_computed_tokens + num_new)
        assert block_ids is not None, "admitted without enough free blocks"
        self.running.add(request)
        step.input.new.append(
            NewRequest(
                request.row,
                list(request.token_ids),
                request.num_prompt_tokens,
                [list(ids) for ids in request.block_ids],
                request.sampling,
            )
        )
        self._commit(step, request, num_new, [])

    def _chunk(self, request: Request, budget: int, alone: bool) -> int:
        """How many tokens of a request run in this step."""
        num_new = min(request.num_tokens + request.num_in_flight - request.num_computed_tokens, budget)
        if self.long_prefill_token_threshold and not alone:
            num_new = min(num_new, self.long_prefill_token_threshold)
        if request.sampling.prompt_logprobs is not None and not alone:
            num_new = min(num_new, SCORED_CHUNK)
        start = request.num_computed_tokens
        return self.kv.chunk_end(request, start + num_new) - start

    def _commit(self, step: Step, request: Request, num_new: int, new_blocks: list[list[int]]) -> None:
        """Put a chunk into the step. From here on it counts as computed: whatever comes later runs after it."""
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_new
        batch = step.input
        batch.rows.append(request.row)
        batch.num_computed.append(start)
        batch.num_scheduled.append(num_new)
        batch.new_blocks.append(new_blocks)
        if end == len(request.token_ids) + request.num_in_flight and request.sampling.max_tokens:
            batch.samples.append(len(step.requests))
            request.num_in_flight += 1
        step.requests.append(request)
        step.num_tokens += num_new
        if start < request.num_prompt_tokens:
            self._note_prefill(request, start, min(end, request.num_prompt_tokens))
        if end >= (request.num_published + 1) * self.kv.block_size:
            step.published[request] = self.kv.publish(request)

    # ---- memory pressure

    def _reserve(self) -> int:
        """Free blocks that admission leaves to the running requests, so that it does not take what they are about to
        need and preempt in turn.
        """
        return sum(map(self._num_expected_blocks, self.running))

    def _num_expected_blocks(self, request: Request) -> int:
        """Blocks for the rest of its prompt, and for outputs."""
        return self.kv.num_expected(request)

    def _make_way(self) -> None:
        """If the first waiting request outranks running ones and does not fit, preempt from the last of these, unless
        even all of them would not do.
        """
        request = self.waiting.first
        outranked = [other for other in self.running if other.priority > request.priority]
        obtainable = self.kv.pool.num_free + sum(
            self.kv.num_held(other) + self._num_expected_blocks(other) for other in outranked
        )
        if request.num_in_flight or obtainable < self.kv.num_missing(request, Match()) + self._reserve():
            return
        while outranked and not self._fits(request):
            self._preempt(outranked.pop())

    def _fits(self, request: Request) -> bool:
        """Whether there is a row and memory to admit a request."""
        return (
            len(self.running) < self.max_running
            and self.kv.num_missing(request, self.kv.match(request)) + self._reserve() <= self.kv.pool.num_free
        )

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it will be computed again, or found in the prefix cache."""
        self._vacate(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.waiting.add(request)

    def _vacate(self, request: Request, discard: bool = False) -> None:
        published = self.kv.free(request, discard)
        if published and self._in_flight:
            self._in_flight[-1].published.setdefault(request, []).extend(published)
        self._leave_row(request)

    def _leave_row(self, request: Request) -> None:
        self.running.remove(request)
        heappush(self.free_rows, request.row)
        request.row = -1

    # ---- results

    def update(self, step: Step, output: StepOutput) -> Outputs:
        """Take in what a step sampled; the steps come in the order in which they were scheduled.

        Returns the outputs it brings, by client.
        """
        assert self._in_flight[0] is step, "a step was skipped"
        now, outputs = time.time(), {}
        if errors := {i: message for i, message in (output.errors or {}).items() if i not in step.ignored}:
            self._recompute_dependents(step, errors.keys())
            for i, message in errors.items():
                self._fail(step.requests[i], message, now, outputs)
        self._in_flight.popleft()
        prompt_logprobs = self._new_prompt_logprobs(step, output)
        for i, token_ids, logprobs in zip(
            step.input.samples, output.token_ids, output.logprobs or [None] * len(output.token_ids), strict=True
        ):
            request = step.requests[i]
            if request.status is not Status.FINISHED and i not in step.ignored:
                self._receive(request, token_ids, logprobs, prompt_logprobs.pop(request, None), now, outputs)
        for request, entries in prompt_logprobs.items():
            if request.sampling.max_tokens:
                outputs.setdefault(request.client, []).append(
                    EngineOutput(request.request_id, [], prompt_logprobs=entries)
                )
        self._finish_unsampled(step, prompt_logprobs, now, outputs)
        return outputs

    def _receive(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        now: float,
        outputs: Outputs,
    ) -> None:
        """Append the sampled tokens of one request, up to one that ends it."""
        request.num_in_flight -= 1
        num_received, reason = 0, None
        if len(request.token_ids) == request.num_prompt_tokens:
            request.token_ids = list(request.token_ids)  # the prompt's, which other choices share
        while num_received < len(token_ids) and not reason:
            request.token_ids.append(token_ids[num_received])
            num_received += 1
            reason = request.finish_reason()
        if num_received < len(token_ids):
            token_ids, logprobs = token_ids[:num_received], logprobs and logprobs[:num_received]
        self.counts.num_generation_tokens += num_received
        if not request.first_token_time:
            request.first_token_time = now
        if reason:
            self._finish(request, reason, now, outputs, token_ids, logprobs, prompt_logprobs)
        else:
            output = EngineOutput(
                request.request_id, token_ids, None, None, logprobs, prompt_logprobs, request.num_cached_tokens
            )
            outputs.setdefault(request.client, []).append(output)

    def _new_prompt_logprobs(self, step: Step, output: StepOutput) -> dict[Request, list[TokenLogprobs]]:
        """The prompt logprobs of this step that were not delivered before: after a preemption the first ones come
        again.

        The chunk of prompt tokens [a, b) predicts tokens a + 1 .. min(b, num_prompt_tokens - 1), which are entries a ..
        of the whole list.
        """
        entries_of = {}
        for i, entries in (output.prompt_logprobs or {}).items():
            request = step.requests[i]
            new = entries[max(request.num_prompt_logprobs - step.input.num_computed[i], 0) :]
            if new and request.status is not Status.FINISHED and i not in step.ignored:
                request.num_prompt_logprobs += len(new)
                entries_of[request] = new
        return entries_of

    def _finish_unsampled(
        self, step: Step, prompt_logprobs: dict[Request, list[TokenLogprobs]], now: float, outputs: Outputs
    ) -> None:
        """max_tokens=0: a request ends when its prompt is computed."""
        if len(step.input.samples) == len(step.requests):
            return
        for i, request in enumerate(step.requests):
            if request.status is Status.FINISHED or request.sampling.max_tokens or i in step.ignored:
                continue
            entries = prompt_logprobs.get(request)
            if step.input.num_computed[i] + step.input.num_scheduled[i] == request.num_prompt_tokens:
                self._finish(request, "length", now, outputs, [], None, entries)
            elif entries:
                outputs.setdefault(request.client, []).append(
                    EngineOutput(request.request_id, [], prompt_logprobs=entries)
                )

    def _recompute_dependents(self, step: Step, failed: Collection[int]) -> None:
        """Nobody may keep anything that was computed from blocks which the requests at the positions `failed` filled in
        `step` or later.

        Such a block was found by others only since `step`, all of whose successors are still in flight: no token that
        depends on it has been told. So it suffices to follow, through these steps and in the order of computation, who
        was admitted on such blocks and what they published in turn.
        """
        failing = {step.requests[i] for i in failed}
        tainted, blocks = set(failing), set()
        for later in self._in_flight:
            entered = {new.row: new.block_ids for new in later.input.new}
            for i, request in enumerate(later.requests):
                if later is not step or i not in failed:
                    self._judge_entry(
                        request, entered.get(later.input.rows[i]), later.input.num_computed[i], tainted, blocks
                    )
                    if request in tainted and i not in later.ignored:
                        self._ignore(later, i)
                if request in tainted:
                    blocks.update(later.published.get(request, ()))
                else:
                    blocks.difference_update(later.published.get(request, ()))  # the same block, filled anew
            for request in later.published.keys() & tainted:
                blocks.update(later.published[request])  # also what was published when it had left
        self.kv.forget(list(blocks))
        for request in tainted - failing:
            if request.status is Status.RUNNING:
                self.kv.release(request)
                self._leave_row(request)
                self._wait_again(request)

    def _judge_entry(
        self,
        request: Request,
        block_ids: list[list[int]] | None,
        num_computed: int,
        tainted: set[Request],
        blocks: set[int],
    ) -> None:
        """A request that enters with `block_ids` depends on those of its cached prefix, and on nothing from before."""
        if block_ids is None:
            return
        if blocks.isdisjoint(self.kv.shared_prefix(block_ids, num_computed)):
            tainted.discard(request)
        else:
            tainted.add(request)

    def _ignore(self, step: Step, position: int) -> None:
        request = step.requests[position]
        step.ignored.add(position)
        if request.status is not Status.FINISHED and position in step.input.samples:
            request.num_in_flight -= 1

    def _fail(self, request: Request, message: str, now: float, outputs: Outputs) -> None:
        if request.status is not Status.FINISHED:
            self._remove(request, discard=True)
            outputs.setdefault(request.client, []).append(
                EngineOutput(request.request_id, [], "error", error=message, timing=request.timing(now))
            )

    def _finish(
        self,
        request: Request,
        reason: str,
        now: float,
        outputs: Outputs,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> None:
        stop_reason = request.stop_reason() if reason == "stop" else None
        self._remove(request)
        outputs.setdefault(request.client, []).append(
            EngineOutput(
                request.request_id,
                token_ids,
                reason,
                stop_reason,
                logprobs,
                prompt_logprobs,
                request.num_cached_tokens,
                None,
                request.timing(now),
            )
        )

    def _remove(self, request: Request, discard: bool = False) -> None:
        """A request ends, wherever it is."""
        if request.status is Status.RUNNING:
            self._vacate(request, discard)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.client, request.request_id]

    # ---- counting

    def _note_first_scheduling(self, request: Request) -> None:
        request.scheduled_time = time.time()
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.reads_cache and self.kv.enable_prefix_caching:
            self.counts.prefix_cache_queries += request.num_prompt_tokens
            self.counts.prefix_cache_hits += request.num_cached_tokens

    def _note_prefill(self, request: Request, start: int, end: int) -> None:
        """Prompt tokens [start, end) run; `num_prefill_computed` counts each once, the metric every time."""
        self.counts.num_prompt_tokens += end - start
        request.num_prefill_computed = max(request.num_prefill_computed, end - request.num_cached_tokens)

    def stats(self) -> EngineStats:
        """Gauges now, and counts since `take_stats`."""
        return self.counts.snapshot(len(self.running), len(self.waiting), self.kv.usage)

    def take_stats(self) -> EngineStats:
        stats, self.counts = self.stats(), Counts()
        return stats
