"""Contract 2, server <-> engine. Torch-free; the server imports it, nothing else of `engine`.

The engine binds one ROUTER socket, each server connects one DEALER. Every message is one msgpack frame, a tagged array;
the type is the tag. Every `AddRequest` is answered by exactly one `EngineOutput` with a `finish_reason`, whatever
happens, unless it was aborted by its client.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.worker.messages import MemoryPlan, SamplingParams, TokenLogprobs, WorkerReady

__all__ = [
    "STACKS_FOLDER",
    "STACKS_SUFFIX",
    "AbortRequests",
    "AddRequest",
    "Call",
    "CallResult",
    "Choice",
    "EngineDead",
    "EngineOutput",
    "EngineStats",
    "FromEngine",
    "Hello",
    "MemoryPlan",
    "Progress",
    "Ready",
    "RequestTiming",
    "SamplingParams",
    "StepOutputs",
    "ToEngine",
    "TokenLogprobs",
    "WorkerReady",
]


# the environment variable that tells an engine's processes where to write their stacks down, each to a file
STACKS_FOLDER = "QUIRE_STACKS_FOLDER"
STACKS_SUFFIX = ".stacks"


class _Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    pass


# ---- server -> engine


class Hello(_Message):
    """Sent on connecting; answered by `Progress` messages until `Ready`."""


class Choice(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One sequence to generate.

    `output_token_ids` are outputs it already has: a resubmission after an engine restart goes on behind them.
    """

    request_id: str
    seed: int
    output_token_ids: list[int] = []


class AddRequest(_Message):
    """A prompt to continue: by the sequence `request_id`, and by `siblings`, which differ from it in what a `Choice`
    has. So the prompt is sent once.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    age: float = 0.0  # seconds since the server got it, by the server's monotonic clock: the older is served first
    priority: int = 0  # lower runs first
    cache_salt: str | None = None  # prefixes are shared only among equal salts
    siblings: list[Choice] = []  # they share their prompt's blocks even when prefix caching is off

    @property
    def choices(self) -> list[Choice]:
        """All sequences, the first one included."""
        return [Choice(self.request_id, self.sampling.seed, self.output_token_ids), *self.siblings]

    def having(self, choices: Iterable[Choice], age: float) -> AddRequest:
        """The same with other choices."""
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
        )


class AbortRequests(_Message):
    """Free these requests before the next step. Idempotent; no output follows."""

    request_ids: list[str]


class Call(_Message):
    """A utility call, answered by `CallResult`: reset_prefix_cache() -> bool, stats() -> EngineStats fields as a dict."""

    call_id: int
    method: str
    args: list = []


# ---- engine -> server


class Progress(_Message):
    """While starting."""

    phase: str  # "starting", "loading weights", "profiling memory", "allocating KV cache", "warming up"
    fraction: float  # of this phase, 0 to 1


class Ready(_Message):
    """The engine has completed a step and takes requests."""

    worker: WorkerReady
    depth: int


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Engine-side clock readings of one request (time.time() seconds) and counts, sent with its last output."""

    queued: float
    scheduled: float  # first time it ran (0 if never)
    first_token: float  # 0 if none
    finished: float
    num_preemptions: int
    num_prefill_computed: int  # prompt tokens computed rather than found in the prefix cache


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one request, in order.

    `finish_reason` is stop, length, abort or error, and set exactly once, on the last.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None  # the stop token id, when one of stop_token_ids ended it
    logprobs: list[TokenLogprobs] | None = None  # parallel to new_token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # the next prompt positions, in order
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when the request was first scheduled
    error: str | None = None
    timing: RequestTiming | None = None  # with the last output
    error_kind: str = "engine"  # whose fault an error is: the engine's, or, with "invalid_request", the request's


class EngineStats(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Gauges now, and counts since the previous message."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # computed
    num_generation_tokens: int = 0
    iteration_tokens: list[int] = []  # tokens of each step


class StepOutputs(_Message):
    """All outputs of one step for one server. `outputs` may be empty when only stats changed."""

    outputs: list[EngineOutput]
    stats: EngineStats | None = None


class CallResult(_Message):
    call_id: int
    value: object = None
    error: str | None = None


class EngineDead(_Message):
    """The last message of an engine that cannot go on."""

    reason: str


ToEngine = Hello | AddRequest | AbortRequests | Call
FromEngine = Progress | Ready | StepOutputs | CallResult | EngineDead
