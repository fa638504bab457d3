"""One sequence in the engine, and the queue that keeps waiting and running sequences in order of service."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec

from quire.engine.messages import NO_COUNTS, AddRequest, Choice, EngineOutput, MediaItem, RequestTiming
from quire.worker.messages import NewRequest, TokenLogprobs


class Status(Enum):
    WAITING = "waiting"  # new or preempted
    FETCHING = "fetching"  # waits for blocks of its prefix from a lower tier; others are scheduled meanwhile
    RUNNING = "running"  # has a row and blocks
    FINISHED = "finished"  # finished, failed or aborted; steps in flight skip it


class Request:
    """Counts and ids of one sequence. Only `Scheduler` changes it, except for the block fields, which only
    `KVCacheManager` and its groups change.

    `token_ids` are the known tokens, prompt then outputs; until the first output they are the prompt's list, which the
    n choices of a request share. Three counts describe its progress:

        |<------------- num_tokens ------------->|<- num_in_flight ->|
        |<-- num_computed_tokens -->|<--------- num_new ------------>|

    `num_computed_tokens` includes the steps in flight. `num_in_flight` tokens are sampled by such steps, but their ids
    have not been received. Drafts in a step in flight are computed, too, beyond `num_tokens`; when its output arrives
    `num_computed_tokens` falls back to those that were accepted.
    """

    __slots__ = (
        "adapters",
        "background",
        "block_hashes",
        "block_ids",
        "cache_key",
        "cache_salt",
        "cache_seconds",
        "client",
        "counts",
        "encoded",
        "first_token_time",
        "group",
        "junction",
        "key",
        "max_total_tokens",
        "may_call_tools",
        "media",
        "num_computed_tokens",
        "num_draft",
        "num_given_back",
        "num_in_flight",
        "num_preemptions",
        "num_prefill_computed",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published",
        "passing_checkpoint",
        "pooling",
        "pools_all",
        "predicts",
        "queued_time",
        "rank",
        "report_prefill",
        "request_id",
        "row",
        "sampling",
        "scheduled_time",
        "status",
        "stop_ids",
        "tenant",
        "token_ids",
        "transfer",
        "turn_start",
        "weight",
    )

    def __init__(
        self,
        message: AddRequest,
        choice: Choice,
        client: bytes,
        sequence: int,
        group: int,
        arrival: float,
        max_model_len: int,
        by_priority: bool,
        pools_all: bool = False,
    ):
        """Create the sequence of a choice. `sequence` is its serial number in the engine, `group` the one of the first
        choice of its request. `arrival` is a time of the engine's monotonic clock. `pools_all`: its vector needs the
        hidden states of the whole prompt.
        """
        self.client = client  # the ROUTER identity of its server, used to address outputs
        self.request_id = choice.request_id
        sampling = message.sampling
        self.sampling = (
            sampling if choice.seed == sampling.seed else msgspec.structs.replace(sampling, seed=choice.seed)
        )
        self.background = message.background
        self.report_prefill = message.report_prefill
        self.rank = (message.background, message.priority if by_priority else 0)  # a lower rank preempts a higher one
        self.tenant, self.weight = message.tenant, message.weight
        self.pooling = message.pooling
        self.pools_all = pools_all
        self.cache_salt = message.cache_salt
        self.cache_key, self.cache_seconds = message.cache_key, message.cache_seconds
        self.may_call_tools = message.may_call_tools
        self.turn_start = message.turn_start
        self.transfer = message.transfer
        self.media = message.media
        self.adapters = message.adapters
        self.group = group
        self.queued_time = time.time()
        self.key = (*self.rank, arrival, sequence)  # order of service; unique

        self.stop_ids = frozenset(sampling.stop_token_ids) | frozenset(sampling.eos_token_ids)
        self.token_ids = (
            message.prompt_token_ids + choice.output_token_ids if choice.output_token_ids else message.prompt_token_ids
        )
        self.num_prompt_tokens = len(message.prompt_token_ids)
        # length stops are predicted from this
        self.max_total_tokens = min(self.num_prompt_tokens + message.sampling.max_tokens, max_model_len)

        self.status = Status.WAITING
        self.row = -1
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_draft = 0  # drafts that the worker had after its last output; a step may verify fewer
        self.predicts = False  # these drafts come from `sampling.prediction`
        self.block_ids: list[list[int]] = []  # per cache group
        # per cache group: number of blocks at the front that no later token attends to, NULL_BLOCK in block_ids
        self.num_given_back: list[int] = []
        self.block_hashes: list[bytes] = []  # hashes of the full blocks of token_ids computed so far
        # number of tokens of its known prefix whose blocks were cached, but not the state after them; 0: none
        self.junction = 0
        # the newest checkpoint after the prompt, which the next one replaces, and its key
        self.passing_checkpoint: tuple[int, bytes] | None = None
        self.num_published = 0  # number of published blocks at the front of block_ids

        # Number of delivered prompt logprobs. A resubmitted request with outputs has delivered all of them.
        self.num_prompt_logprobs = self.num_prompt_tokens - 1 if choice.output_token_ids else 0
        self.counts = NO_COUNTS  # for its client
        self.num_prefill_computed = 0
        self.num_preemptions = 0
        self.scheduled_time = 0.0  # 0: not scheduled yet
        self.first_token_time = 0.0
        self.encoded: tuple[float, float] | None = None

    @property
    def arrival(self) -> float:
        """Return the time of arrival in seconds, by the engine's monotonic clock."""
        return self.key[-2]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_cache(self) -> bool:
        """Return whether the request may use the prefix cache. Prompt logprobs need the logits of every prompt
        position, and most kinds of pooling the hidden states, so such a request computes its whole prompt once.
        """
        if self.pools_all:
            return False
        return self.sampling.prompt_logprobs is None or self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    @property
    def conversation(self) -> str:
        """Return the key of the conversation that the client named, "" for none."""
        return "" if self.cache_key is None or self.cache_key.endswith("/") else self.cache_key

    def images(self, start: int, end: int) -> list[MediaItem]:
        """Return the images whose spans overlap tokens [start, end)."""
        return [item for item in self.media if item.offset < end and item.offset + item.length > start]

    def finish_reason(self) -> str | None:
        """Return "stop" if the last output is an EOS or stop id that counts, "length" if no further token fits, else
        None.
        """
        num_tokens, last = len(self.token_ids), self.token_ids[-1]
        if num_tokens < self.max_total_tokens and last not in self.stop_ids:
            return None
        sampling = self.sampling
        # Stop ids among the first min_tokens outputs do not count; the sampler also bans them there.
        counts = num_tokens - self.num_prompt_tokens > sampling.min_tokens
        ends = (last in sampling.eos_token_ids and not sampling.ignore_eos) or last in sampling.stop_token_ids
        if counts and ends:
            return "stop"
        return "length" if num_tokens >= self.max_total_tokens else None

    def as_new(self) -> NewRequest:
        """Return everything that a worker needs to compute the request."""
        return NewRequest(
            self.row,
            list(self.token_ids),
            self.num_prompt_tokens,
            [list(ids) for ids in self.block_ids],
            self.sampling,
            self.pooling,
            self.media,
            self.adapters,
            self.conversation,
            f"{self.tenant}\0{self.cache_salt or ''}",
        )

    @property
    def is_decoding(self) -> bool:
        """Return whether only its last known token is left to compute, after its prompt."""
        computed = self.num_computed_tokens
        known = len(self.token_ids) + self.num_in_flight
        return known == computed + 1 and computed >= self.num_prompt_tokens

    def append_one(self, token_id: int) -> str | None:
        """Append an output token. Returns the finish reason, None if the request continues."""
        token_ids = self.token_ids
        if len(token_ids) == self.num_prompt_tokens:
            token_ids = self.token_ids = list(token_ids)  # copy: the sibling choices share the prompt's list
        token_ids.append(token_id)
        if token_id not in self.stop_ids and len(token_ids) < self.max_total_tokens:
            return None
        return self.finish_reason()

    def append(self, token_ids: list[int]) -> tuple[int, str | None]:
        """Append output tokens up to one that finishes the request. Returns (number appended, finish reason)."""
        for i, token_id in enumerate(token_ids, 1):
            if reason := self.append_one(token_id):
                return i, reason
        return len(token_ids), None

    def take_back_drafts(self, num_draft: int, num_tokens: int) -> int:
        """Account for a step that verified `num_draft` drafts and gave `num_tokens` tokens: rejected drafts do not
        count as computed, and their KV cache slots will be written again. Returns the number of accepted drafts.
        """
        if self.status is Status.RUNNING:  # else it was preempted meanwhile: none of its tokens is computed
            self.num_computed_tokens -= num_draft - (num_tokens - 1)  # the last token is not computed yet
        num_accepted = max(num_tokens - 1, 0)
        if num_draft:
            accepted, rejected = self.counts.accepted + num_accepted, self.counts.rejected + num_draft - num_accepted
            self.counts = msgspec.structs.replace(self.counts, accepted=accepted, rejected=rejected)
        return num_accepted

    def output(self, token_ids: list[int], finish_reason: str | None = None, **fields: Any) -> EngineOutput:
        """Return an output with new tokens for the client."""
        return EngineOutput(
            self.request_id,
            token_ids,
            finish_reason,
            self.stop_reason() if finish_reason == "stop" else None,
            counts=self.counts,
            **fields,
        )

    def unfinished_output(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        timing: RequestTiming | None,
    ) -> EngineOutput:
        """Return `output` of an unfinished request. Arguments are positional: runs for each request in each step."""
        fields = token_ids, None, None, logprobs, prompt_logprobs, self.counts, None, timing
        return EngineOutput(self.request_id, *fields)

    def stop_reason(self) -> int | None:
        """Return the stop id that ended a request with finish reason "stop", or None if it was an EOS token."""
        last = self.token_ids[-1]
        return None if last in self.sampling.eos_token_ids and not self.sampling.ignore_eos else last

    @property
    def phase(self) -> str:
        """Return waiting, prefill (its prompt, or after a preemption all its tokens, is being computed) or decode."""
        if self.status is Status.WAITING:
            return "waiting"
        return "decode" if self.num_output_tokens and self.num_computed_tokens >= self.num_prompt_tokens else "prefill"

    def describe(self, now: float) -> dict[str, object]:
        return {
            "id": self.request_id,
            "phase": self.phase,
            "tenant": self.tenant,
            "priority": self.rank[1],
            "background": self.background,
            "age": now - self.queued_time,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_cached_tokens": self.counts.cached,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
        }

    def timing(self, now: float) -> RequestTiming:
        return RequestTiming(
            self.queued_time,
            self.scheduled_time,
            self.first_token_time,
            now,
            self.num_preemptions,
            self.num_prefill_computed,
            self.encoded,
        )


by_key = attrgetter("key")


class RequestQueue:
    """Requests in order of service (`Request.key`): the first is served first and preempted last."""

    def __init__(self) -> None:
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    @property
    def first(self) -> Request:
        return self._items[0]

    @property
    def last(self) -> Request:
        return self._items[-1]

    def add(self, request: Request) -> None:
        insort(self._items, request, key=by_key)

    def remove(self, request: Request) -> None:
        i = bisect_left(self._items, request.key, key=by_key)
        assert self._items[i] is request
        del self._items[i]
