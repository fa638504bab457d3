"""Contract 2, server <-> engine. Torch-free; the only module of `engine` that the server imports.

The engine binds one ROUTER socket and each server connects one DEALER socket. Every message is one msgpack frame, a
tagged array; the tag is the type. Every `AddRequest` is answered by exactly one `EngineOutput` with a `finish_reason`
per choice, unless its client aborts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from quire.worker.messages import (
    GRAMMAR_LIMITS,
    MAX_NGRAM_COMPARISONS,
    SAMPLERS,
    Alignment,
    Dry,
    LoraUse,
    MediaInfo,
    MediaItem,
    MemoryPlan,
    NoRepeatNgram,
    PoolingInfo,
    PoolingParams,
    SamplerChain,
    SamplingParams,
    SpeechRules,
    ThinkingBudget,
    TokenLogprobs,
    Vocabulary,
    WorkerReady,
    most_blocks,
)

__all__ = [
    "GRAMMAR_LIMITS",
    "MAX_NGRAM_COMPARISONS",
    "NO_COUNTS",
    "SAMPLERS",
    "AbortRequests",
    "AddRequest",
    "Alignment",
    "Call",
    "CallResult",
    "CalledTools",
    "Choice",
    "Dry",
    "EngineCalls",
    "EngineDead",
    "EngineOutput",
    "EngineStats",
    "FromEngine",
    "Hello",
    "LoraUse",
    "MediaInfo",
    "MediaItem",
    "MemoryPlan",
    "NoRepeatNgram",
    "PoolingInfo",
    "PoolingParams",
    "Progress",
    "Ready",
    "RequestTiming",
    "SamplerChain",
    "SamplingParams",
    "SpeechRules",
    "StepOutputs",
    "ThinkingBudget",
    "TierStats",
    "ToEngine",
    "TokenCounts",
    "TokenLogprobs",
    "Transfer",
    "Vocabulary",
    "WorkerReady",
    "most_blocks",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    pass


# ---- server -> engine


class Hello(_Message):
    """Sent when a server connects; answered by `Progress` messages until `Ready`."""


class Choice(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One sequence to generate.

    `output_token_ids` are outputs that the sequence already has: when a request is resubmitted after an engine restart,
    generation continues after them.
    """

    request_id: str
    seed: int
    output_token_ids: list[int] = []


class Transfer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A transfer of a prompt's blocks between servers: `send` keeps them for a server that will ask; `blocks`, their
    numbers within the prompt per cache group, are at `host` and `port` of another server.
    """

    send: bool = False
    host: str = ""
    port: int = 0
    blocks: list[list[int]] = []


class AddRequest(_Message):
    """A prompt to continue, as the sequence `request_id` and as `siblings`, which differ from it only in the fields of
    `Choice`. The prompt is sent once.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    # seconds since the server received it, by the server's monotonic clock; older requests are served first
    age: float = 0.0
    priority: int = 0  # lower runs first
    cache_salt: str | None = None  # requests share prefixes only if their salts are equal
    siblings: list[Choice] = []  # choices share their prompt's blocks even when prefix caching is off
    background: bool = False  # a line of a batch: yields to every foreground request (`engine/scheduler.py`)
    pooling: PoolingParams | None = None  # return a vector instead of tokens
    media: list[
        MediaItem
    ] = []  # images of the prompt, by offset; the server keeps their features until the last output
    tenant: str = ""  # shares the engine with other tenants (`engine/shares.py`)
    weight: float = 1.0  # the tenant's share, above 0
    adapters: list[LoraUse] = []  # LoRA adapters, whose products are summed
    report_prefill: bool = False  # outputs without tokens report how much of the prompt is computed
    # tenant/name of the conversation whose blocks are kept longer than others', for `cache_seconds`; without a name,
    # the beginning of the prompt identifies the conversation
    cache_key: str | None = None
    cache_seconds: float = 0.0
    may_call_tools: bool = False  # `CalledTools` may follow its end
    turn_start: int = 0  # number of prompt tokens before the user's last message, 0: unknown
    transfer: Transfer | None = None
    engine: int | None = None  # index of the engine that the client chose

    @property
    def choices(self) -> list[Choice]:
        """Return all sequences, including the first."""
        return [Choice(self.request_id, self.sampling.seed, self.output_token_ids), *self.siblings]

    def with_choices(self, choices: Iterable[Choice], age: float) -> AddRequest:
        """Return a copy of this request with other choices and a new age."""
        first, *others = choices
        sampling = (
            self.sampling
            if first.seed == self.sampling.seed
            else msgspec.structs.replace(self.sampling, seed=first.seed)
        )
        return AddRequest(
            first.request_id,
            self.prompt_token_ids,
            sampling,
            first.output_token_ids,
            age,
            self.priority,
            self.cache_salt,
            others,
            self.background,
            self.pooling,
            self.media,
            self.tenant,
            self.weight,
            self.adapters,
            self.report_prefill,
            self.cache_key,
            self.cache_seconds,
            self.may_call_tools,
            self.turn_start,
            self.transfer,
            self.engine,
        )


class AbortRequests(_Message):
    """Free these requests before the next step. Idempotent; no output follows."""

    request_ids: list[str]


class CalledTools(_Message):
    """The answers of these requests, which have ended, called tools: their client comes back with the results."""

    request_ids: list[str]


class Call(_Message):
    """A call of a method of `EngineCalls`, answered by `CallResult`."""

    call_id: int
    method: str
    args: list = []


class EngineCalls(Protocol):
    """Methods of an engine that servers call. Results are of types that msgpack preserves."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes in every tier. Returns False, and does nothing, while requests hold any block."""

    def free_cache(self, key: str) -> bool:
        """Forget a conversation (`AddRequest.cache_key`). Returns whether its blocks were known."""

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Take the tokens that grammars need, a `Vocabulary` as msgpack, before the first request with a grammar."""

    def load_lora(self, key: str, folder: str) -> str:
        """Read a LoRA adapter before its first request. Returns the reason if it cannot be used, else ""."""

    def unload_lora(self, key: str) -> None:
        """Forget a LoRA adapter, unless requests use it."""

    def start_profile(self) -> str:
        """Begin a profile of the workers' steps. Returns the reason if that is not possible, else ""."""

    def stop_profile(self) -> list[str]:
        """End the profile. Returns [reason if that is not possible, name of the first rank's file]."""

    def save_slot(self, number: int, name: str) -> dict[str, int] | None:
        """Save llama.cpp's slot to a file. Returns the counts of its answer, {} if that is not possible, None for a
        slot of another engine.
        """

    def restore_slot(self, number: int, name: str) -> dict[str, int] | None:
        """Restore llama.cpp's slot from a file. Returns the same as `save_slot`."""

    def erase_slot(self, number: int) -> dict[str, int] | None:
        """Forget the contents of llama.cpp's slot. Returns the same as `save_slot`."""

    def waiting(self, request_ids: list[str]) -> list[str]:
        """Return those of `request_ids` that were never scheduled."""

    def log_lines(self) -> list[dict[str, object]]:
        """Return the newest lines of the engine's log that are warnings or worse (`kept_lines`)."""

    def requests(self) -> list[dict[str, object]]:
        """Return every request (`Request.describe`)."""

    def abort(self, request_ids: list[str]) -> list[str]:
        """End requests of any server with finish reason abort. Returns the ids of those found."""

    def stats(self) -> dict[str, object]:
        """Return the fields of `EngineStats`."""

    def describe_tiers(self) -> dict[str, object] | None:
        """Return totals of the tiers below the pool since the start; None without any."""

    def kv_event_source(self) -> dict[str, object] | None:
        """Return where KV events are published, with vLLM's keys; None if they are not published."""

    def describe_ops(self) -> dict[str, object]:
        """Return the operations in use, the state of faster ones, and the time.time() at which those came into use."""


# ---- engine -> server


class Progress(_Message):
    """Sent while the engine starts."""

    # "starting", "loading weights", "profiling memory", "allocating KV cache", "recording CUDA graphs", "warming up"
    phase: str
    fraction: float  # for this phase, 0 to 1


class Ready(_Message):
    """The engine completed its first step and accepts requests."""

    worker: WorkerReady
    depth: int


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Times of one request by the engine's clock (time.time() seconds) and counts, sent with its first tokens, because
    the server may end it at a stop string, and with its last output.
    """

    queued: float
    scheduled: float  # first time it ran, 0 if never
    first_token: float  # 0 if it has no output
    finished: float
    num_preemptions: int
    num_prefill_computed: int  # prompt tokens computed rather than found in the prefix cache
    # with traces: when encoding of its first image began and that of the last one ended
    encoded: tuple[float, float] | None = None


class TokenCounts(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Counts of a sequence's tokens so far: those of its prompt, then those of its output."""

    cached: int = 0  # prompt tokens found in the prefix cache when the request was first scheduled
    prefilled: int = 0  # with `report_prefill`, before the first token: prompt tokens in the KV cache
    # drafts that were accepted and rejected
    accepted: int = 0
    rejected: int = 0

    def then(self, later: TokenCounts) -> TokenCounts:
        """Return the counts after a later report: none decreases, even if another engine continues the request."""
        if later == self:
            return self
        astuple = msgspec.structs.astuple
        return TokenCounts(*map(max, astuple(self), astuple(later)))


NO_COUNTS = TokenCounts()


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one request, in order.

    `finish_reason` is stop, length, abort or error; it is set exactly once, on the last output.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None  # the stop token id, if one of stop_token_ids ended the request
    logprobs: list[TokenLogprobs] | None = None  # parallel to new_token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # the next prompt positions, in order
    counts: TokenCounts = NO_COUNTS
    error: str | None = None
    timing: RequestTiming | None = None  # with the first tokens and the last output
    error_kind: str = "engine"  # "engine" or "invalid_request": the cause of the error
    pooled: bytes | None = None  # with the last output of a request with `pooling`: its vector, float32
    sent: Transfer | None = None  # with the last output of a request that sends its blocks: where they are


class TierStats(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Contents of the tiers below an engine's pool, on its first rank, and their traffic since the previous message."""

    used: dict[str, int] = {}  # bytes by tier
    counts: dict[str, float] = {}  # by name, see `TierStore.stats`
    store_sizes: list[int] = []  # bytes of each transfer from the pool
    load_sizes: list[int] = []  # bytes of each transfer into the pool


class EngineStats(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Current gauges, and counts since the previous message."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # computed
    num_generation_tokens: int = 0
    iteration_tokens: list[int] = []  # tokens of each step
    num_encoded: int = 0  # embeddings of images
    encoder_cache_usage: float = 0.0  # 0 to 1
    num_drafts: int = 0  # times that a step verified drafts of a request
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = []  # drafts accepted, by their place after the last known token
    running_adapters: list[str] = []  # names of running requests' adapters
    waiting_adapters: list[str] = []
    external_queries: int = 0  # tokens that the pool did not have, looked up in lower tiers
    external_hits: int = 0  # tokens among these that were loaded from lower tiers
    tiers: TierStats | None = None  # None: not collected for this message
    num_ended: int = 0  # requests that ended after they ran, excluding batches


class StepOutputs(_Message):
    """All outputs of one step for one server. `outputs` is empty if only the statistics changed."""

    outputs: list[EngineOutput]
    stats: EngineStats | None = None


class CallResult(_Message):
    call_id: int
    value: object = None
    error: str | None = None


class EngineDead(_Message):
    """The last message of an engine that failed."""

    reason: str


ToEngine = Hello | AddRequest | AbortRequests | CalledTools | Call
FromEngine = Progress | Ready | StepOutputs | CallResult | EngineDead
