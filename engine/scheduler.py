"""Decide which requests run in the next step and process the results of each step.

There is no prefill phase and no decode phase. A request has known tokens (`num_tokens`) and tokens whose ids are still
on the device (`num_in_flight`); some of them are computed. Every step lets `num_computed_tokens` catch up within one
token budget. Chunked prompts, mixed batches, prefix cache hits and resumption after preemption all follow from this
rule.

Scheduling needs counts only, never token ids, so several steps may be in flight, under five rules:
(a) `num_in_flight` counts sampled tokens whose ids are not known yet.
(b) Length stops are predicted. Only EOS, stop ids and aborts overshoot, by at most depth - 1 steps; `update` skips the
outputs of those steps.
(c) A preempted request keeps `num_in_flight`, still receives those tokens, and is admitted again when it reaches 0.
(d) Blocks and rows can be reused as soon as they are freed, because the worker runs steps in order.
(e) A request for which the worker has drafts waits for its tokens in flight, and then for the step that verifies the
drafts: until then the number of accepted ones is unknown. Other requests overlap meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Any

import msgspec

from quire.configs.config import SchedulerConfig
from quire.configs.speculation import MAX_DRAFT
from quire.engine.budget import StepBudget
from quire.engine.chunks import Chunks
from quire.engine.dependents import dependents
from quire.engine.encoder_cache import EncoderCache
from quire.engine.kv.contents import Contents
from quire.engine.kv.manager import KVCacheManager, Match
from quire.engine.kv.tiers import Tiers
from quire.engine.kv.transfers import Transfers
from quire.engine.messages import AddRequest, EngineOutput, EngineStats
from quire.engine.request import Request, RequestQueue, Status
from quire.engine.room import Room
from quire.engine.shares import FairQueue, Shares
from quire.engine.stats import Counts, with_adapters
from quire.engine.step import Step
from quire.engine.validation import check_media, check_request
from quire.worker.messages import (
    GRAMMAR_ERROR,
    NO_TOKEN_ERROR,
    StepInput,
    StepOutput,
    TokenLogprobs,
    WorkerReady,
    longest_request,
)

MAX_BLOCKED = 8  # requests with blocks on other servers that may find no room before a step skips the rest

Outputs = dict[bytes, list[EngineOutput]]  # by client


class Scheduler:
    """Owns all requests; no other class changes them. `schedule` and `update` are called in turn, with up to `depth`
    steps scheduled before the first is updated.

    With several pipeline `stages`, decoding requests form as many groups, which take turns: while the last stage
    computes the next tokens of one group, the first stage works on another group, whose tokens are known. Prefills need
    no turns, because all their tokens are known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        ready: WorkerReady,
        kv: KVCacheManager,
        stages: int = 1,
        tiers: Tiers | None = None,
    ):
        self.kv, self.num_groups, self.turn = kv, stages, 0
        self.tiers = tiers  # below the pool; None: there are none
        self.transfers: Transfers | None = None  # of blocks to and from other servers; None: there are none
        self._unasked: list[Request] = []  # waiting requests whose prefixes were not looked up in `tiers`
        self.by_priority = config.scheduling_policy == "priority"
        whole_prompts = ready.pooling is not None and ready.pooling.whole_prompts
        self.token_budget = ready.max_num_batched_tokens
        # every running request gets at least one token per step
        self.max_running = min(ready.max_num_seqs, ready.max_num_batched_tokens)
        if any(group.kind == "state" for group in ready.groups):  # each may hold a checkpoint and a page that it writes
            self.max_running = min(self.max_running, ready.num_states // 2)
        # a request that runs alone always fits
        self.max_model_len = longest_request(
            ready.groups, kv.pool.num_usable, kv.block_size, self.token_budget, ready.max_model_len
        )
        self._vocab_size = ready.vocab_size
        # tokens that one step may sample, drafts included: the bound of its logits
        self._num_verifiable = max(ready.max_num_seqs, MAX_DRAFT + 1)
        self.pooling, self.max_loras, self.media = ready.pooling, ready.max_loras, ready.media
        media = ready.media
        self.images = EncoderCache(media.cache_size, media.encoder_budget) if media else EncoderCache()
        threshold = 0 if whole_prompts else config.long_prefill_token_threshold
        self.chunks = Chunks(kv, self.images, threshold, media is not None and media.whole)
        self.shares = Shares()
        follows = ready.overlaps and stages == 1
        self.budget = StepBudget(self.token_budget, whole_prompts, self.shares, follows)
        self.waiting = FairQueue(self.shares)
        self.running = RequestQueue()
        self.room = Room(kv, self.running, self.max_running, ready.max_loras)
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.free_rows = list(range(ready.max_num_seqs))  # a heap: the lowest free row is used first
        self._in_flight: deque[Step] = deque()  # scheduled, results not processed yet
        self.contents = Contents(kv, tiers, self._in_flight, ready.max_num_seqs)
        self.counts = Counts()
        self._num_added = self._num_steps = 0
        self._num_decodes = 0  # running foreground requests past their prompts, in the last step

    # ---- adding and aborting requests

    def add(self, message: AddRequest, client: bytes = b"") -> list[EngineOutput]:
        """Queue the choices of a request. Returns the outputs of choices that need no step: resubmissions that were
        already complete.

        Raises ValueError for a request that can never run, and then adds none of its choices. Every field of the
        message that could cause an error is used here, so that `schedule` cannot fail because of one request.
        """
        choices = message.choices
        if not message.background:
            self.budget.background.record_foreground()
        for choice in choices:
            if (client, choice.request_id) in self.requests:
                raise ValueError(f"request_id {choice.request_id!r} is already in use")
        check_request(message, self.max_model_len, self._vocab_size, self.pooling, self.max_loras)
        # an image that is computed whole always fits next to the tokens of the other running requests
        check_media(message, self.media, self.token_budget - self.max_running + 1)
        pools_all = message.pooling is not None and (self.pooling is None or self.pooling.reads_all)
        first, arrival = self._num_added + 1, time.monotonic() - message.age
        requests = [
            Request(message, choice, client, i, first, arrival, self.max_model_len, self.by_priority, pools_all)
            for i, choice in enumerate(choices, first)
        ]
        self._num_added += len(requests)
        complete = []
        for request in requests:
            if request.num_output_tokens and (reason := request.finish_reason()):
                complete.append(request.output([], reason, timing=request.timing(time.time())))
            else:
                self.requests[client, request.request_id] = request
                self.shares.enter(request)
                if not request.background:
                    self.budget.pace.record_request(request.tenant)
                self._wait(request)
        return complete

    def abort(self, request_ids: list[str], client: bytes = b"") -> None:
        """Free these requests at once. Unknown and finished ids are ignored.

        `update` skips aborted requests in steps that are still in flight.
        """
        for request_id in request_ids:
            if request := self.requests.get((client, request_id)):
                self._remove(request)

    def not_started(self, request_ids: list[str]) -> list[str]:
        """Return those of `request_ids` that were never scheduled."""
        asked = set(request_ids)
        return [one.request_id for one in self.waiting if not one.scheduled_time and one.request_id in asked]

    def end(self, request_ids: list[str]) -> Outputs:
        """Abort requests of any client. Returns their last outputs."""
        asked, now, outputs = set(request_ids), time.time(), {}
        for request in [one for one in self.requests.values() if one.request_id in asked]:
            self._finish(request, "abort", now, outputs, [])
        return outputs

    def describe(self) -> list[dict[str, object]]:
        """Return every request as plain data."""
        return [request.describe(time.time()) for request in self.requests.values()]

    def abort_client(self, client: bytes) -> None:
        """Abort all requests of a server that disconnected."""
        self.abort([request_id for owner, request_id in self.requests if owner == client], client)

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)
        if self.tiers is not None:
            self._unasked.append(request)

    # ---- scheduling a step

    @property
    def is_fetching(self) -> bool:
        """Return whether blocks are being fetched from lower tiers."""
        return self.tiers is not None and self.tiers.busy

    def _fetch(self) -> None:
        """Queue requests whose fetches from lower tiers ended, and start fetches for new requests."""
        for request in self.tiers.poll():
            request.status = Status.WAITING
            self.waiting.add(request)
        unasked, self._unasked = self._unasked, []
        num_blocked = 0
        for request in unasked:
            if request.status is not Status.WAITING:
                continue
            if self.transfers is not None and self.transfers.receives(request):
                if num_blocked >= MAX_BLOCKED or not self.room.has_blocks(request):  # fetched when they fit
                    num_blocked += 1
                    self._unasked.append(request)
                    continue
                self.transfers.expect(request)
            if self.tiers.begin(
                request,
                self.kv.pool.num_free - self.room.reserve(),
                # others that may be admitted meanwhile need two each
                self.kv.pool.num_free_states - 2 * min(self.max_running - len(self.running), len(self.waiting) - 1),
                self.contents.unsettled(),
            ):
                self.waiting.remove(request)
                request.status = Status.FETCHING

    def schedule(self) -> Step | None:
        """Choose the requests of the next step and advance their counters. Returns None if nothing can run, or if
        background requests alone wait for the step in flight.
        """
        only_background = all(queue.first.background for queue in (self.running, self.waiting) if queue)
        if self._in_flight and only_background and self.budget.background.expects_foreground:
            return None
        step = Step(StepInput(self._num_steps + 1, [], [], [], [], [], [], [], [], {}), [])
        self.kv.start_step()
        if self.tiers is not None:
            self._fetch()
        self.images.start_step()
        self.chunks.start_step()
        self.budget.start_step(self.running, self._num_decodes, *self.waiting.foreground_load())
        if self.waiting and self.running:
            self._preempt_for_waiting()
        for _ in range(self.num_groups):  # stop at the first group that has work
            self.turn = (self.turn + 1) % self.num_groups
            self._schedule_running(step)
            if step.requests:
                break
        self._admit_waiting(step)
        if not step.requests:
            return None
        encode, evict = self.images.take_step()
        self.counts.num_encoded += sum(item.num_embeds for item in encode)
        step.input.encode.extend(encode)
        step.input.evict.extend(evict)
        self._num_steps += 1
        for request, position, num_tokens, page in self.kv.checkpoints.take():
            step.input.checkpoints.setdefault(position, []).append((num_tokens, page))
            step.published.setdefault(request, []).append(page)
        if self.tiers is not None:
            step.input.stores.extend(self.tiers.take_evicted(self.contents.unsettled()))
        self._in_flight.append(step)
        self.counts.iteration_tokens.append(step.num_tokens)
        return step

    def _schedule_running(self, step: Step) -> None:
        """Schedule the running requests, background ones last and with a budget of their own."""
        batch: dict[Request, int] = {}  # number of tokens per request, in batch order
        of_background = self.budget.background
        new_blocks: dict[Request, list[list[int]]] = {}  # new block ids per request and group
        others = [request for request in self.running if not request.background]
        self._num_decodes = self._schedule_some(others, self.budget.tokens, self.token_budget, batch, new_blocks)
        num_tokens = sum(batch.values())
        are_others = bool(others) or (bool(self.waiting) and not self.waiting.first.background)
        of_background.start_step(are_others, num_tokens, self.token_budget)
        if len(others) < len(self.running):
            background = [request for request in self.running if request.background]
            room = self.token_budget - num_tokens
            self._schedule_some(background, of_background.budget, room, batch, new_blocks)
            of_background.budget -= sum(batch.values()) - num_tokens
        decodes = list(takewhile(lambda request: batch[request] == 1 and request.is_decoding, batch))
        self._add_decodes(step, decodes, new_blocks)
        for request, num_new in islice(batch.items(), len(decodes), None):
            self._add_to_step(step, request, num_new, new_blocks.get(request, []))

    def _schedule_some(
        self,
        requests: list[Request],
        budget: int,
        room: int,
        batch: dict[Request, int],
        new_blocks: dict[Request, list[list[int]]],
    ) -> int:
        """Schedule decodes first, so that a long prompt never delays another request's next token, then prefills with
        the remaining budget. Only an image that is computed whole may exceed the budget, up to `room` tokens.
        Returns the number of requests past their prompts.
        """
        prefills = []
        room_for_drafts = min(budget - len(requests), self._num_verifiable - len(batch) - len(requests))
        for request in requests:
            if request.status is not Status.RUNNING:  # preempted by an earlier request in this loop
                continue
            num_tokens = len(request.token_ids) + request.num_in_flight
            num_new = num_tokens - request.num_computed_tokens
            if num_new > 1 or (num_new and request.media and request.num_computed_tokens < request.num_prompt_tokens):
                prefills.append(request)
            elif (
                num_new == 1
                and request.row % self.num_groups == self.turn
                and not (request.num_in_flight and (request.num_draft or num_tokens >= request.max_total_tokens))
                and budget > 0
            ):
                num_draft = self.room.num_draft(request, room_for_drafts) if request.num_draft else 0
                has_room = not self.kv.has_states and self.kv.has_room(request, num_tokens + num_draft)
                if has_room or self._allocate(request, num_tokens + num_draft, batch, new_blocks):
                    batch[request] = 1 + num_draft
                    budget -= 1 + num_draft
                    room -= 1 + num_draft
                    room_for_drafts -= num_draft
        if not prefills:
            return len(requests)
        parts = self.budget.divide(prefills, self.room.next_admitted(self.waiting, prefills), budget)
        for request in prefills:
            part = min(budget, parts.get(request.tenant, budget))
            if request.status is Status.RUNNING and part > 0:
                start = request.num_computed_tokens
                num_new = self.chunks.size(request, start, part, room, alone=len(self.running) == 1)
                if num_new and self._allocate(request, start + num_new, batch, new_blocks):
                    batch[request] = num_new
                    budget -= num_new
                    room -= num_new
                    if request.tenant in parts:
                        parts[request.tenant] -= num_new
        return len(requests) - len(prefills)

    def _allocate(
        self, request: Request, num_tokens: int, batch: dict[Request, int], new_blocks: dict[Request, list[list[int]]]
    ) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a running request, preempting later requests if needed.
        Returns False if the request must skip this step.

        The last request never preempts itself: its blocks stay useful until an earlier request needs them. The first
        request always gets its blocks.
        """
        if self.kv.has_states:
            self._record_published(request, self.kv.publish_late(request))
        if self.kv.has_room(request, num_tokens):
            return True
        while (block_ids := self.kv.allocate(request, num_tokens)) is None:
            victim = self.running.last
            if victim is request:
                return False
            batch.pop(victim, None)
            self._preempt(victim)
        new_blocks[request] = block_ids
        return True

    def _admit_waiting(self, step: Step) -> None:
        """Admit waiting requests in order of service while budget, rows and blocks last.

        A request that does not fit is not overtaken, unless it waits for an adapter slot.
        """
        if not self.waiting:
            return
        reserve = self.room.reserve()
        while self.waiting and step.num_tokens < self.budget.tokens and len(self.running) < self.max_running:
            request = self.room.next_waiting(self.waiting)
            if request is None:
                return
            budget = self.budget.limit_of_waiting(request, step.num_tokens)
            if not budget:
                return
            # rule (c); every request needs at least one block
            if request.num_in_flight or reserve >= self.kv.pool.num_free:
                return
            matched = self.kv.match(request)
            if self.kv.num_missing(request, matched) + reserve > self.kv.pool.num_free:
                return
            if self.kv.awaits_checkpoint(request, matched):
                return
            if self.is_fetching and not self.kv.has_states_for_one_more:
                return  # a fetch holds them
            num_tokens = step.num_tokens
            start, room = matched.num_blocks * self.kv.block_size, self.token_budget - num_tokens
            num_new = self.chunks.size(request, start, budget, room, alone=not self.running and len(self.waiting) == 1)
            if not num_new:  # its first image must wait
                return
            self._admit(step, request, matched, num_new)
            self.budget.charge(request, step.num_tokens - num_tokens)
            reserve += self.kv.num_expected(request)

    def _admit(self, step: Step, request: Request, matched: Match, num_new: int) -> None:
        """Move a request from waiting to running, with a row, the blocks of its cached prefix and its first chunk of
        `num_new` tokens.
        """
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.row = heappop(self.free_rows)
        self.kv.attach(request, matched)
        if not request.scheduled_time:
            self.counts.count_admission(request, request.reads_cache and self.kv.enable_prefix_caching)
        block_ids = self.kv.allocate(request, request.num_computed_tokens + num_new)
        assert block_ids is not None, "admitted without enough free blocks"
        self.running.add(request)
        step.input.new.append(request.as_new())
        self._add_to_step(step, request, num_new, [])

    def _add_decodes(self, step: Step, requests: list[Request], new_blocks: dict[Request, list[list[int]]]) -> None:
        """Do as `_add_to_step` for requests that decode without drafts, all at once: most requests of most steps."""
        step.add_decodes(requests, new_blocks)
        self.shares.charge_one_each(requests)
        size = self.kv.block_size
        for request in requests:
            request.num_computed_tokens = end = request.num_computed_tokens + 1
            if end // size > request.num_published:
                step.published[request] = self.kv.publish(request)

    def _add_to_step(self, step: Step, request: Request, num_new: int, new_blocks: list[list[int]]) -> None:
        """Add a chunk to the step and count it as computed: later steps run after it."""
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_new
        step.add(request, start, num_new, new_blocks)
        self.shares.charge(request, num_new)
        if start < request.num_prompt_tokens:
            self.counts.count_prefill(request, start, min(end, request.num_prompt_tokens))
            for item in request.images(start, end):
                keep = self.images.hold if item.offset + item.length > end else self.images.release
                keep(item.key, request)
        position = len(step.requests) - 1
        if num_new > 1 and position not in step.input.num_draft:
            self.kv.plan_checkpoints(request, position, start, end)
        if end // self.kv.block_size > request.num_published:
            step.published[request] = self.kv.publish(request)

    # ---- memory pressure

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests until the first waiting one fits, if it may take their place."""
        request = self.waiting.first
        victims = self.room.victims(request, self.shares.num_tenants)
        while victims and not self.room.can_admit(request):
            self._preempt(victims.pop())

    def _preempt(self, request: Request) -> None:
        """Take the row and all blocks from a running request and queue it again. Its tokens are recomputed later, or
        found in the prefix cache.
        """
        self._free_row_and_blocks(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        request.num_draft = 0
        request.num_preemptions += 1
        self.counts.num_preemptions += 1
        self._wait(request)

    def _free_row_and_blocks(self, request: Request, discard: bool = False) -> None:
        self._record_published(request, self.kv.free(request, discard))
        self._free_row(request)

    def _record_published(self, request: Request, published: list[int]) -> None:
        """Record that steps in flight fill these blocks of the request, which became visible after the steps were
        scheduled.
        """
        if published and self._in_flight:
            self._in_flight[-1].published.setdefault(request, []).extend(published)

    def _free_row(self, request: Request) -> None:
        self.running.remove(request)
        for item in request.media:
            self.images.release(item.key, request)
        heappush(self.free_rows, request.row)
        request.row = -1

    # ---- processing results

    def update(self, step: Step, output: StepOutput) -> Outputs:
        """Process the results of a step. Steps are updated in the order in which they were scheduled.

        Returns the new outputs by client.
        """
        assert self._in_flight[0] is step, "a step was skipped"
        now, outputs = time.time(), {}
        if errors := {i: message for i, message in (output.errors or {}).items() if i not in step.ignored}:
            self._recompute_dependents(step, errors.keys())
            for i, message in errors.items():
                self._fail(step.requests[i], message, now, outputs)
        self._in_flight.popleft()
        if self.tiers is not None:
            self.tiers.record_step(step.num_tokens, time.monotonic() - step.scheduled)
        self.budget.record_end(step)
        prompt_logprobs = step.new_prompt_logprobs(output)
        drafted, drafts, predicted = step.input.num_draft, output.num_draft or {}, output.predicted or ()
        for i, request, token_ids, logprobs in step.sampled(output):
            if drafted and (num_draft := drafted.get(i, 0)):
                self.counts.count_drafts(num_draft, request.take_back_drafts(num_draft, len(token_ids)))
            if (drafts or request.num_draft) and request.status is Status.RUNNING:  # else drafts went with its row
                request.num_draft, request.predicts = drafts.get(i, 0), i in predicted
            entries = prompt_logprobs.pop(request, None) if prompt_logprobs else None
            request.num_in_flight -= 1
            if len(token_ids) == 1:
                reason = request.append_one(token_ids[0])
            else:  # up to the token that finishes it
                num, reason = request.append(token_ids)
                if num < len(token_ids):
                    token_ids, logprobs = token_ids[:num], logprobs and logprobs[:num]
            self.counts.num_generation_tokens += len(token_ids)
            is_first, request.first_token_time = not request.first_token_time, request.first_token_time or now
            if reason:
                self._finish(request, reason, now, outputs, token_ids, logprobs=logprobs, prompt_logprobs=entries)
            else:
                timing = request.timing(now) if is_first else None
                outputs.setdefault(request.client, []).append(
                    request.unfinished_output(token_ids, logprobs, entries, timing)
                )
        for request, entries in prompt_logprobs.items():
            if request.sampling.max_tokens:
                _report(request, outputs, prompt_logprobs=entries)
        self._finish_unsampled(step, prompt_logprobs, output.pooled or {}, now, outputs)
        for request, num_tokens in step.unfinished_prompts():
            _report(request, outputs, counts=msgspec.structs.replace(request.counts, prefilled=num_tokens))
        return outputs

    def _finish_unsampled(
        self,
        step: Step,
        prompt_logprobs: dict[Request, list[TokenLogprobs]],
        pooled: dict[int, bytes],
        now: float,
        outputs: Outputs,
    ) -> None:
        """Finish requests with max_tokens=0 whose prompt is computed, and deliver their prompt logprobs or vectors."""
        for i, request in step.unsampled():
            entries = prompt_logprobs.get(request)
            if step.input.num_computed[i] + step.input.num_scheduled[i] == request.num_prompt_tokens:
                self._finish(request, "length", now, outputs, [], prompt_logprobs=entries, pooled=pooled.get(i))
            elif entries:
                _report(request, outputs, prompt_logprobs=entries)

    def _recompute_dependents(self, step: Step, failed: Collection[int]) -> None:
        """Recompute every request that read blocks filled by the requests at batch positions `failed`."""
        found, blocks = dependents(self._in_flight, step, failed, self.kv)
        self.kv.forget(list(blocks))
        for request in found:
            if request.status is Status.RUNNING:
                self.kv.release(request)
                self._free_row(request)
                self._requeue(request)

    def _fail(self, request: Request, message: str, now: float, outputs: Outputs) -> None:
        for item in request.media:
            self.images.forget(item.key)  # the image may be the cause
        if request.status is not Status.FINISHED:
            self._remove(request, discard=True)
            own = message == NO_TOKEN_ERROR and request.sampling.excludes_tokens
            kind = "invalid_request" if own or message.startswith(GRAMMAR_ERROR) else "engine"
            timing = request.timing(now)
            _report(request, outputs, finish_reason="error", error=message, error_kind=kind, timing=timing)

    def _finish(
        self, request: Request, reason: str, now: float, outputs: Outputs, token_ids: list[int], **fields: Any
    ) -> None:
        if self.transfers is not None and request.transfer is not None and request.transfer.send:
            fields["sent"] = self.transfers.send(request, self.contents.unsettled())
        self._remove(request)
        output = request.output(token_ids, reason, timing=request.timing(now), **fields)
        outputs.setdefault(request.client, []).append(output)

    def _remove(self, request: Request, discard: bool = False) -> None:
        """Finish a request, whether it is running or waiting."""
        if request.status is Status.RUNNING:
            if self.contents.slots is not None:
                self.contents.slots.note(request)
            self._free_row_and_blocks(request, discard)
            self.counts.num_ended += not request.background
        elif request.status is Status.FETCHING:
            self.tiers.cancel(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.client, request.request_id]
        self.shares.leave(request)

    # ---- statistics

    def stats(self) -> EngineStats:
        """Return current gauges, and counts since the last `flush_stats`."""
        num_running = len(self.running)
        stats = self.counts.snapshot(num_running, len(self.requests) - num_running, self.kv.usage, self.images.usage)
        return with_adapters(stats, self.running, self.waiting) if self.max_loras else stats

    def _count_tiers(self) -> None:
        if self.tiers is not None:
            self.counts.external_queries, self.counts.external_hits = self.tiers.counts.since_last()
            self.counts.tiers = self.tiers.stats(now=not self.requests)

    def flush_stats(self) -> EngineStats:
        self._count_tiers()
        stats, self.counts = self.stats(), Counts()
        return stats


def _report(request: Request, outputs: Outputs, **fields: Any) -> None:
    """Add an output without new tokens for the request's client."""
    output = EngineOutput(request.request_id, [], **{"counts": request.counts} | fields)
    outputs.setdefault(request.client, []).append(output)
