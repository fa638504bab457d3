"""Decide which requests run in the next step and process the results of each step.

There is no prefill phase and no decode phase. A request has known tokens (`num_tokens`) and tokens whose ids are still
on the device (`num_in_flight`); some of them are computed. Every step lets `num_computed_tokens` catch up within one
token budget. Chunked prompts, mixed batches, prefix cache hits and resumption after preemption all follow from this
rule.

Scheduling needs counts only, never token ids, so several steps may be in flight, under four rules:
(a) `num_in_flight` counts sampled tokens whose ids are not known yet.
(b) Length stops are predicted. Only EOS, stop ids and aborts overshoot, by at most depth - 1 steps; `update` skips the
outputs of those steps.
(c) A preempted request keeps `num_in_flight`, still receives those tokens, and is admitted again when it reaches 0.
(d) Blocks and rows can be reused as soon as they are freed, because the worker runs steps in order.

A step may verify drafts of a running request (`StepInput.num_draft`), of which the scheduler knows only the number.
Only workers that run one step at a time propose any, so the number of accepted ones is known before the next step.

Blocks are shared before the step that fills them is known to succeed. When a step fails a request, every request that
read blocks filled by it, in the same step or in later steps in flight, is recomputed (`_recompute_dependents`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import msgspec

from quire.configs.config import SchedulerConfig
from quire.configs.speculation import MAX_DRAFT
from quire.engine.encoder_cache import EncoderCache
from quire.engine.kv.manager import KVCacheManager, Match
from quire.engine.kv.slots import Slots
from quire.engine.kv.tiers import Tiers
from quire.engine.messages import AddRequest, EngineOutput, EngineStats
from quire.engine.request import Request, RequestQueue, Status
from quire.engine.shares import FairQueue, Shares, fair_parts
from quire.engine.stats import Counts
from quire.engine.validation import check_media, check_request
from quire.worker.messages import (
    GRAMMAR_ERROR,
    NO_TOKEN_ERROR,
    NewRequest,
    StepInput,
    StepOutput,
    TokenLogprobs,
    WorkerReady,
    longest_request,
)

Outputs = dict[bytes, list[EngineOutput]]  # by client
# prompt tokens with log-probabilities in a step that several requests share: each costs a row of logits, and one that
# arrives waits for the steps in flight. Each gets at least the second number, so that none holds up those behind it.
SCORED_CHUNK, LEAST_SCORED = 256, 16
# Background requests get one token for so many of the others in a step, and at least one, so that they neither slow the
# others nor starve. When they are alone their steps have this fraction of the budget, because an arriving request waits
# for the steps in flight. For some seconds after the last other request, when the next one is likely, their steps are
# shorter still, and one at a time.
BACKGROUND_SHARE, BACKGROUND_STEP = 4, 8
SHORT_STEP, SHORT_STEP_SECONDS = 256, 5.0


@dataclass(slots=True)
class Step:
    """One scheduled step. `requests[i]` is at batch position i of `input`.

    `published` lists, per request, the blocks that became visible to other requests when this step was scheduled. This
    step or an earlier one fills them.
    """

    input: StepInput
    requests: list[Request]
    num_tokens: int = 0
    published: dict[Request, list[int]] = field(default_factory=dict)
    # batch positions whose results are discarded because they were computed from blocks of a failed request
    ignored: set[int] = field(default_factory=set)
    scheduled: float = field(default_factory=time.monotonic)

    def contents(self) -> str:
        """What was computed, for a person."""
        counts = self.input.num_scheduled
        num_decodes = sum(count == 1 for count in counts)
        text = f"{len(counts)} requests with {self.num_tokens} tokens, of which {num_decodes} had one each"
        if num_decodes < len(counts):
            text += f" and the largest {max(counts)} after {max(self.input.num_computed)} computed ones"
        return text + (f", and {len(self.input.encode)} images" if self.input.encode else "")


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
        self.slots: Slots | None = None  # what the last request of each row left; None: nobody asks
        self._unasked: list[Request] = []  # waiting requests whose prefixes were not looked up there
        self.by_priority = config.scheduling_policy == "priority"
        self._last_other = -math.inf  # time.monotonic() when a request that is not a background one was last here
        self._scored_room = SCORED_CHUNK  # of the step being scheduled
        self._background_budget = 0  # tokens that background requests may still get in the step being scheduled
        self.whole_prompts = ready.pooling is not None and ready.pooling.whole_prompts
        self.long_prefill_token_threshold = 0 if self.whole_prompts else config.long_prefill_token_threshold
        self.token_budget = ready.max_num_batched_tokens
        # every running request gets at least one token per step
        self.max_running = min(ready.max_num_seqs, ready.max_num_batched_tokens)
        if any(group.kind == "state" for group in ready.groups):  # each may hold a checkpoint and a page that it writes
            self.max_running = min(self.max_running, ready.num_states // 2)
        # a request that runs alone always fits
        self.max_model_len = longest_request(
            ready.groups, kv.pool.num_usable, kv.block_size, self.token_budget, ready.max_model_len
        )
        # tokens that one step may sample, drafts included: that bounds its logits
        self._num_verifiable = max(ready.max_num_seqs, MAX_DRAFT + 1)
        self.vocab_size = ready.vocab_size
        self.pooling = ready.pooling
        self.max_loras = ready.max_loras
        self.media = media = ready.media
        self.images = EncoderCache(media.cache_size, media.encoder_budget) if media else EncoderCache()
        self.shares = Shares()
        self.waiting = FairQueue(self.shares)
        self.running = RequestQueue()
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.free_rows = list(range(ready.max_num_seqs))  # a heap: the lowest free row is used first
        self._with_drafts: list[Request] = []  # of which the worker has drafts, for the next step only
        self._in_flight: deque[Step] = deque()  # scheduled, results not processed yet
        self.counts = Counts()
        self._num_added = 0
        self._num_steps = 0

    # ---- adding and aborting requests

    def add(self, message: AddRequest, client: bytes = b"") -> list[EngineOutput]:
        """Queue the choices of a request. Returns the outputs of choices that need no step: resubmissions that were
        already complete.

        Raises ValueError for a request that can never run, and then adds none of its choices. Every field of the
        message that could cause an error is used here, so that `schedule` cannot fail because of one request.
        """
        choices = message.choices
        if not message.background:
            self._last_other = time.monotonic()
        for choice in choices:
            if (client, choice.request_id) in self.requests:
                raise ValueError(f"request_id {choice.request_id!r} is already in use")
        check_request(message, self.max_model_len, self.vocab_size, self.pooling, self.max_loras)
        # an image that is computed whole always fits beside the tokens of the other running requests
        check_media(message, self.media, self.token_budget - self.max_running + 1)
        pools_all = message.pooling is not None and self.pooling.reads_all
        first, arrival = self._num_added + 1, time.monotonic() - message.age
        requests = [
            Request(message, choice, client, i, first, arrival, self.max_model_len, self.by_priority, pools_all)
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
                self.shares.enter(request)
                self._wait(request)
        return complete

    def abort(self, request_ids: list[str], client: bytes = b"") -> None:
        """Free these requests at once. Unknown and finished ids are ignored.

        `update` skips aborted requests in steps that are still in flight.
        """
        for request_id in request_ids:
            if request := self.requests.get((client, request_id)):
                self._remove(request)

    def not_begun(self, request_ids: list[str]) -> list[str]:
        """Those of the requests that were never scheduled."""
        asked = set(request_ids)
        return [one.request_id for one in self.waiting if not one.scheduled_time and one.request_id in asked]

    def end(self, request_ids: list[str]) -> Outputs:
        """Abort requests whoever their client is. Returns their last outputs."""
        asked, now, outputs = set(request_ids), time.time(), {}
        for request in [one for one in self.requests.values() if one.request_id in asked]:
            self._finish(request, "abort", now, outputs, [], None, None)
        return outputs

    def describe(self) -> list[dict[str, object]]:
        """Every request as plain data."""
        now = time.time()
        return [request.describe(now) for request in self.requests.values()]

    def abort_client(self, client: bytes) -> None:
        """Abort all requests of a server that disconnected."""
        self.abort([request_id for owner, request_id in self.requests if owner == client], client)

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)
        if self.tiers is not None:
            self._unasked.append(request)

    # ---- scheduling a step

    def _fetch(self) -> None:
        """Queue requests whose blocks came from lower tiers, and have the blocks of new requests fetched."""
        for request in self.tiers.poll():
            request.status = Status.WAITING
            self.waiting.add(request)
        unasked, self._unasked = self._unasked, []
        for request in unasked:
            if request.status is Status.WAITING and self.tiers.begin(
                request,
                self.kv.pool.num_free - self._reserve(),
                # others that may be admitted meanwhile need two each
                self.kv.pool.num_free_states - 2 * min(self.max_running - len(self.running), len(self.waiting) - 1),
                self._unsettled(),
            ):
                self.waiting.remove(request)
                request.status = Status.FETCHING

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes in every tier. Returns False, and does nothing, while requests hold any block."""
        if not self.kv.reset_prefix_cache():
            return False
        if self.tiers is not None:
            self.tiers.clear()
        return True

    def open_slots(self, call: Callable[..., Any], index: int) -> None:
        """Remember what requests leave in their rows, for llama.cpp's slot files. `call` calls the workers."""

        def store_evicted() -> None:
            if self.tiers is not None:
                self.tiers.store_evicted(self._unsettled())

        self.slots = Slots(self.kv, call, len(self.free_rows), index, store_evicted)

    def free_cache(self, key: str) -> bool:
        """Forget a conversation (`AddRequest.cache_key`) in every tier. Returns whether it was known."""
        keys = self.kv.free_key(key)
        if keys and self.tiers is not None:
            self.tiers.remove(keys)
        return keys is not None

    def _unsettled(self) -> set[int]:
        """Blocks that steps in flight fill, which may still fail."""
        return {i for step in self._in_flight for ids in step.published.values() for i in ids}

    def save(self, most: int, only_free: bool = False) -> int:
        """Give the disk tier up to `most` hot blocks, with `only_free` of those that no request holds. Returns how many
        it took.
        """
        return self.tiers.save(most, self._unsettled(), only_free) if self.tiers is not None else 0

    def schedule(self) -> Step | None:
        """Choose the requests of the next step and advance their counters. Returns None if nothing can run, or only
        background requests after the step in flight.
        """
        if self._in_flight and self._is_background_only() and self._expects_others():
            return None
        step = Step(StepInput(self._num_steps + 1, [], [], [], [], [], [], [], [], {}), [])
        self.kv.start_step()
        if self.tiers is not None:
            self._fetch()
        self.images.start_step()
        self._scored_room = SCORED_CHUNK
        if self.waiting and self.running and self.running.last.rank > self.waiting.first.rank:
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
        if self.tiers is not None:
            step.input.stores.extend(self.tiers.take_evicted(self._unsettled()))
        self._in_flight.append(step)
        self.counts.iteration_tokens.append(step.num_tokens)
        return step

    def _is_background_only(self) -> bool:
        return all(queue.first.background for queue in (self.running, self.waiting) if queue)

    def _expects_others(self) -> bool:
        """Whether a request that is not a background one was here lately."""
        return time.monotonic() - self._last_other < SHORT_STEP_SECONDS

    def _schedule_running(self, step: Step) -> None:
        """Schedule the running requests, background ones last and with a budget of their own."""
        batch: dict[Request, int] = {}  # number of tokens per request, in batch order
        new_blocks: dict[Request, list[list[int]]] = {}  # new block ids per request and group
        others = [request for request in self.running if not request.background]
        self._schedule_some(others, self.token_budget, self.token_budget, batch, new_blocks)
        num_tokens = sum(batch.values())
        if others or (self.waiting and not self.waiting.first.background):
            self._last_other = time.monotonic()
            background_budget = max(num_tokens // BACKGROUND_SHARE, 1)
        else:
            fraction = SHORT_STEP if self._expects_others() else BACKGROUND_STEP
            background_budget = max(self.token_budget // fraction, 1)
        self._background_budget = min(background_budget, self.token_budget - num_tokens)
        if len(others) < len(self.running):
            background = [request for request in self.running if request.background]
            room = self.token_budget - num_tokens
            self._schedule_some(background, self._background_budget, room, batch, new_blocks)
            self._background_budget -= sum(batch.values()) - num_tokens
        for request, num_new in batch.items():
            self._add_to_step(step, request, num_new, new_blocks.get(request, []))

    def _schedule_some(
        self,
        requests: list[Request],
        budget: int,
        room: int,
        batch: dict[Request, int],
        new_blocks: dict[Request, list[list[int]]],
    ) -> None:
        """Schedule decodes first, so that a long prompt never delays another request's next token, then prefills with
        the remaining budget. Only an image that is computed whole may exceed the budget, up to `room` tokens.
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
                and not (request.num_in_flight and num_tokens >= request.max_total_tokens)
                and budget > 0
            ):
                num_draft = self._num_draft(request, room_for_drafts) if request.num_draft else 0
                if self._allocate(request, num_tokens + num_draft, batch, new_blocks):
                    batch[request] = 1 + num_draft
                    budget -= 1 + num_draft
                    room -= 1 + num_draft
                    room_for_drafts -= num_draft
        parts = self._parts(prefills, budget)
        for request in prefills:
            part = min(budget, parts.get(request.tenant, budget))
            if request.status is Status.RUNNING and part > 0:
                start = request.num_computed_tokens
                num_new = self._chunk_size(request, start, part, room, alone=len(self.running) == 1)
                if num_new and self._allocate(request, start + num_new, batch, new_blocks):
                    batch[request] = num_new
                    budget -= num_new
                    room -= num_new
                    if request.tenant in parts:
                        parts[request.tenant] -= num_new

    def _parts(self, prefills: list[Request], budget: int) -> dict[str, int]:
        """Tokens of this step's `budget` for the prompts of each tenant, so that the long prompt of one does not delay
        the first token of another, whose prompt is running or next to be admitted. Empty if there is one tenant.
        """
        if not prefills:
            return {}
        needs: dict[str, int] = {}
        weights = {request.tenant: request.weight for request in prefills}
        for request in prefills:
            missing = request.num_tokens + request.num_in_flight - request.num_computed_tokens
            needs[request.tenant] = needs.get(request.tenant, 0) + missing
        first = self.waiting.first if self.waiting else None
        if first and not first.background and first.tenant not in needs and self._can_admit(first):
            needs[first.tenant], weights[first.tenant] = first.num_tokens, first.weight
        return fair_parts(needs, weights, budget) if len(needs) > 1 else {}

    def _num_draft(self, request: Request, limit: int) -> int:
        """Number of drafts of a decoding request to verify, at most `limit`: as many as the worker has, as long as the
        request may get one token more than that, and none if their blocks are scarce.
        """
        num_tokens = len(request.token_ids)
        num_draft = min(request.num_draft, limit, request.max_total_tokens - num_tokens - 1)
        if num_draft <= 0:
            return 0
        if not self.kv.has_room(request, num_tokens + num_draft):
            scarce = len(self.kv.groups) * (len(self.running) + self.kv.num_blocks(num_draft) + 1)
            if self.kv.pool.num_free < scarce:
                return 0
        return num_draft

    def _allocate(
        self, request: Request, num_tokens: int, batch: dict[Request, int], new_blocks: dict[Request, list[list[int]]]
    ) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a running request, preempting later requests if needed.
        Returns False if the request must skip this step.

        The last request never preempts itself: its blocks stay useful until an earlier request needs them. The first
        request always gets its blocks.
        """
        self._note_published(request, self.kv.publish_late(request))
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

        A request that does not fit is never overtaken.
        """
        if not self.waiting:
            return
        reserve = self._reserve()
        while self.waiting and step.num_tokens < self.token_budget and len(self.running) < self.max_running:
            request = self._next_waiting()
            if request is None:
                return
            budget = self.token_budget - step.num_tokens
            if request.background:
                budget = min(budget, self._background_budget)
                if budget <= 0:
                    return
            if self.whole_prompts:  # of a background request, too, which would starve otherwise
                budget = self.token_budget - step.num_tokens
                if request.num_tokens > budget:
                    return
            # rule (c); every request needs at least one block
            if request.num_in_flight or reserve >= self.kv.pool.num_free:
                return
            matched = self.kv.match(request)
            if self.kv.num_missing(request, matched) + reserve > self.kv.pool.num_free:
                return
            if self.kv.awaits_checkpoint(request, matched):
                return
            if self.tiers is not None and self.tiers.busy and not self.kv.has_states_for_one_more:
                return  # a fetch holds them
            num_tokens = step.num_tokens
            start, room = matched.num_blocks * self.kv.block_size, self.token_budget - num_tokens
            num_new = self._chunk_size(request, start, budget, room, alone=not self.running and len(self.waiting) == 1)
            if not num_new:  # its first image must wait
                return
            self._admit(step, request, matched, num_new)
            if request.background:
                self._background_budget -= step.num_tokens - num_tokens
            reserve += self._num_expected_blocks(request)

    def _next_waiting(self) -> Request | None:
        """The first waiting request, or while that waits for another adapter to be done, the first one without any."""
        if self._has_slots(first := self.waiting.first):
            return first
        return next((request for request in self.waiting if not request.adapters), None)

    def _has_slots(self, request: Request, without: Collection[Request] = ()) -> bool:
        """Whether a step may use the adapters of a request beside those of the running ones."""
        if not request.adapters:
            return True
        others = (use.key for other in self.running if other not in without for use in other.adapters)
        return len({use.key for use in request.adapters}.union(others)) <= self.max_loras

    def _admit(self, step: Step, request: Request, matched: Match, num_new: int) -> None:
        """Move a request from waiting to running, with a row, the blocks of its cached prefix, and its first chunk of
        `num_new` tokens.
        """
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.row = heappop(self.free_rows)
        self.kv.attach(request, matched)
        if request.num_cached_tokens < 0:
            self._count_first_scheduling(request)
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
                request.pooling,
                request.media,
                request.adapters,
            )
        )
        self._add_to_step(step, request, num_new, [])

    def _chunk_size(self, request: Request, start: int, budget: int, room: int, alone: bool) -> int:
        """Number of tokens of a request, whose first `start` tokens are computed, to run in this step. 0 if it must
        wait for an image: `_end_at_images` says why.
        """
        num_new = min(request.num_tokens + request.num_in_flight - start, budget)
        if self.long_prefill_token_threshold and not alone:
            num_new = min(num_new, self.long_prefill_token_threshold)
        if request.sampling.prompt_logprobs is not None and not alone:
            num_new = min(num_new, max(self._scored_room, LEAST_SCORED))
            self._scored_room -= num_new
        end = self.kv.chunk_end(request, start, start + num_new)
        return (self._end_at_images(request, start, end, start + room) if request.media else end) - start

    def _end_at_images(self, request: Request, start: int, end: int, limit: int) -> int:
        """Return where a chunk of tokens [start, end) ends: before the first image that cannot be encoded in this step
        or, if images are computed whole, that does not fit into the chunk. Such an image may extend a chunk that begins
        with it, up to token `limit`.
        """
        for item in request.images(start, end):
            last = item.offset + item.length
            if self.media.whole and last > end:
                if item.offset > start or last > limit:
                    return max(item.offset, start)
                end = last
            if not self.images.request(item):
                return max(item.offset, start)
        return end

    def _add_to_step(self, step: Step, request: Request, num_new: int, new_blocks: list[list[int]]) -> None:
        """Add a chunk to the step and count it as computed: later steps run after it."""
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_new
        batch = step.input
        batch.rows.append(request.row)
        batch.num_computed.append(start)
        batch.num_scheduled.append(num_new)
        batch.new_blocks.append(new_blocks)
        known = len(request.token_ids) + request.num_in_flight
        if end > known:
            batch.num_draft[len(step.requests)] = end - known
        if end >= known and request.sampling.max_tokens:
            batch.samples.append(len(step.requests))
            request.num_in_flight += 1
        step.requests.append(request)
        step.num_tokens += num_new
        self.shares.charge(request, num_new)
        if start < request.num_prompt_tokens:
            self._count_prefill(request, start, min(end, request.num_prompt_tokens))
            for item in request.images(start, end):
                keep = self.images.hold if item.offset + item.length > end else self.images.release
                keep(item.key, request)
        if end >= (request.num_published + 1) * self.kv.block_size:
            step.published[request] = self.kv.publish(request)

    # ---- memory pressure

    def _reserve(self) -> int:
        """Number of free blocks that admission leaves to running requests, so that a new request does not take blocks
        that they need soon, which would cause a preemption.
        """
        return sum(map(self._num_expected_blocks, self.running))

    def _num_expected_blocks(self, request: Request) -> int:
        """Number of blocks that a request still needs for the rest of its prompt and for outputs."""
        return self.kv.num_expected(request)

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests of higher rank, last ones first, until the first waiting request fits. Preempt none
        if even all of them would not free enough.
        """
        request = self.waiting.first
        outranked = [other for other in self.running if other.rank > request.rank]
        obtainable = self.kv.pool.num_free + sum(
            self.kv.num_held(other) + self._num_expected_blocks(other) for other in outranked
        )
        if not self._has_slots(request, outranked):
            return
        if request.num_in_flight or obtainable < self.kv.num_missing(request, Match()) + self._reserve():
            return
        while outranked and not self._can_admit(request):
            self._preempt(outranked.pop())

    def _can_admit(self, request: Request) -> bool:
        """Return whether a row and enough blocks are free to admit a request."""
        return (
            len(self.running) < self.max_running
            and self._has_slots(request)
            and self.kv.num_missing(request, self.kv.match(request)) + self._reserve() <= self.kv.pool.num_free
        )

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
        self._note_published(request, self.kv.free(request, discard))
        self._free_row(request)

    def _note_published(self, request: Request, published: list[int]) -> None:
        """Steps in flight fill these blocks of the request, which became visible after they were scheduled."""
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
            self.tiers.note_step(step.num_tokens, time.monotonic() - step.scheduled)
        prompt_logprobs = self._new_prompt_logprobs(step, output)
        for request in self._with_drafts:
            request.num_draft = 0
        self._with_drafts = [step.requests[i] for i in output.num_draft or ()]
        for i, token_ids, logprobs in zip(
            step.input.samples, output.token_ids, output.logprobs or [None] * len(output.token_ids), strict=True
        ):
            request = step.requests[i]
            if request.status is not Status.FINISHED and i not in step.ignored:
                if num_draft := step.input.num_draft.get(i, 0):
                    self._take_back_drafts(request, num_draft, len(token_ids))
                request.num_draft = output.num_draft.get(i, 0) if output.num_draft else 0
                request.predicts = bool(output.predicted) and i in output.predicted
                self._receive(request, token_ids, logprobs, prompt_logprobs.pop(request, None), now, outputs)
        for request, entries in prompt_logprobs.items():
            if request.sampling.max_tokens:
                outputs.setdefault(request.client, []).append(
                    EngineOutput(request.request_id, [], prompt_logprobs=entries)
                )
        self._finish_unsampled(step, prompt_logprobs, output.pooled or {}, now, outputs)
        self._report_prefill(step, outputs)
        return outputs

    def _take_back_drafts(self, request: Request, num_draft: int, num_tokens: int) -> None:
        """A step verified `num_draft` drafts of a request and gave `num_tokens` tokens: those drafts that are not among
        them were not computed. Their slots in the KV cache will be written again.
        """
        request.num_computed_tokens -= num_draft - (num_tokens - 1)  # a request's last token is not computed yet
        num_accepted = max(num_tokens - 1, 0)
        self.counts.count_drafts(num_draft, num_accepted)
        if request.predicts:
            accepted, rejected = request.prediction_tokens
            request.prediction_tokens = accepted + num_accepted, rejected + num_draft - num_accepted

    def _report_prefill(self, step: Step, outputs: Outputs) -> None:
        """Tell how much of the prompts is computed of which not all is: the last chunk comes with a token."""
        for i, request in enumerate(step.requests):
            if not request.report_prefill or request.first_token_time or request.status is Status.FINISHED:
                continue
            num_tokens = step.input.num_computed[i] + step.input.num_scheduled[i]
            if i not in step.ignored and num_tokens < request.num_prompt_tokens:
                report = EngineOutput(request.request_id, [], num_prefilled=num_tokens)
                outputs.setdefault(request.client, []).append(report)

    def _receive(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        now: float,
        outputs: Outputs,
    ) -> None:
        """Append the sampled tokens of one request, up to the token that finishes it."""
        request.num_in_flight -= 1
        num_received, reason = 0, None
        if len(request.token_ids) == request.num_prompt_tokens:
            request.token_ids = list(request.token_ids)  # copy: the sibling choices share the prompt's list
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
                request.request_id,
                token_ids,
                None,
                None,
                logprobs,
                prompt_logprobs,
                request.num_cached_tokens,
                prediction_tokens=request.prediction_tokens,
            )
            outputs.setdefault(request.client, []).append(output)

    def _new_prompt_logprobs(self, step: Step, output: StepOutput) -> dict[Request, list[TokenLogprobs]]:
        """Return the prompt logprobs of this step that were not delivered before. After a preemption the worker sends
        the first ones again.

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
        self,
        step: Step,
        prompt_logprobs: dict[Request, list[TokenLogprobs]],
        pooled: dict[int, bytes],
        now: float,
        outputs: Outputs,
    ) -> None:
        """Finish requests with max_tokens=0 whose prompt is computed, and deliver their prompt logprobs or vectors."""
        if len(step.input.samples) == len(step.requests):
            return
        for i, request in enumerate(step.requests):
            if request.status is Status.FINISHED or request.sampling.max_tokens or i in step.ignored:
                continue
            entries = prompt_logprobs.get(request)
            if step.input.num_computed[i] + step.input.num_scheduled[i] == request.num_prompt_tokens:
                self._finish(request, "length", now, outputs, [], None, entries, pooled.get(i))
            elif entries:
                outputs.setdefault(request.client, []).append(
                    EngineOutput(request.request_id, [], prompt_logprobs=entries)
                )

    def _recompute_dependents(self, step: Step, failed: Collection[int]) -> None:
        """Recompute every request that read blocks filled, in `step` or later, by the requests at batch positions
        `failed`.

        Other requests can find such a block only since `step`, and all later steps are still in flight, so no token
        that depends on it has been delivered. It is enough to walk these steps in order and track which requests were
        admitted on such blocks and which blocks those requests published in turn.
        """
        failing = {step.requests[i] for i in failed}
        tainted, blocks = set(failing), set()
        for later in self._in_flight:
            entered = {new.row: new.block_ids for new in later.input.new}
            for i, request in enumerate(later.requests):
                if later is not step or i not in failed:
                    self._update_tainted(
                        request, entered.get(later.input.rows[i]), later.input.num_computed[i], tainted, blocks
                    )
                    if request in tainted and i not in later.ignored:
                        self._ignore_result(later, i)
                if request in tainted:
                    blocks.update(later.published.get(request, ()))
                else:
                    # the same block, filled again with valid data
                    blocks.difference_update(later.published.get(request, ()))
            for request in later.published.keys() & tainted:
                blocks.update(later.published[request])  # blocks published after the request left the batch
        self.kv.forget(list(blocks))
        for request in tainted - failing:
            if request.status is Status.RUNNING:
                self.kv.release(request)
                self._free_row(request)
                self._requeue(request)

    def _update_tainted(
        self,
        request: Request,
        block_ids: list[list[int]] | None,
        num_computed: int,
        tainted: set[Request],
        blocks: set[int],
    ) -> None:
        """Mark or clear a request that enters the batch with `block_ids`: it is tainted only if its cached prefix
        contains a tainted block, whatever it computed before.
        """
        if block_ids is None:
            return
        if blocks.isdisjoint(self.kv.shared_prefix(block_ids, num_computed)):
            tainted.discard(request)
        else:
            tainted.add(request)

    def _ignore_result(self, step: Step, position: int) -> None:
        request = step.requests[position]
        step.ignored.add(position)
        if request.status is not Status.FINISHED and position in step.input.samples:
            request.num_in_flight -= 1

    def _fail(self, request: Request, message: str, now: float, outputs: Outputs) -> None:
        for item in request.media:
            self.images.forget(item.key)  # it may be the error
        if request.status is not Status.FINISHED:
            self._remove(request, discard=True)
            own = message == NO_TOKEN_ERROR and request.sampling.excludes_tokens
            kind = "invalid_request" if own or message.startswith(GRAMMAR_ERROR) else "engine"
            timing = request.timing(now)
            outputs.setdefault(request.client, []).append(
                EngineOutput(request.request_id, [], "error", error=message, error_kind=kind, timing=timing)
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
        pooled: bytes | None = None,
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
                timing=request.timing(now),
                pooled=pooled,
                prediction_tokens=request.prediction_tokens,
            )
        )

    def _remove(self, request: Request, discard: bool = False) -> None:
        """Finish a request, whether it is running or waiting."""
        if request.status is Status.RUNNING:
            if self.slots is not None:
                self.slots.note(request)
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

    def _count_first_scheduling(self, request: Request) -> None:
        request.scheduled_time = time.time()
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.reads_cache and self.kv.enable_prefix_caching:
            self.counts.prefix_cache_queries += request.num_prompt_tokens
            self.counts.prefix_cache_hits += request.num_cached_tokens

    def _count_prefill(self, request: Request, start: int, end: int) -> None:
        """Count prompt tokens [start, end). `num_prefill_computed` counts each token once; the metric also counts
        recomputation.
        """
        self.counts.num_prompt_tokens += end - start
        request.num_prefill_computed = max(request.num_prefill_computed, end - request.num_cached_tokens)

    def stats(self) -> EngineStats:
        """Current gauges, and counts since the last `flush_stats`."""
        stats = self.counts.snapshot(
            len(self.running), len(self.requests) - len(self.running), self.kv.usage, self.images.usage
        )
        if not self.max_loras:
            return stats
        running, waiting = (
            sorted({use.name for request in queue for use in request.adapters})
            for queue in (self.running, self.waiting)
        )
        return msgspec.structs.replace(stats, running_adapters=running, waiting_adapters=waiting)

    def _count_tiers(self) -> None:
        if self.tiers is not None:
            self.counts.external_queries, self.counts.external_hits = self.tiers.counts.since_last()
            self.counts.tiers = self.tiers.stats(now=not self.requests)

    def flush_stats(self) -> EngineStats:
        self._count_tiers()
        stats, self.counts = self.stats(), Counts()
        return stats
