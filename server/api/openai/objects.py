"""The objects of OpenAI's answers, with vLLM's extensions. UNSET fields are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.messages import RequestTiming
from quire.server.request.usage import TokenUsage

_SHORTEST = 0.001  # seconds over which a rate is told


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    image_tokens: int | UnsetType = UNSET  # for a prompt with images
    video_tokens: int | UnsetType = UNSET  # for a prompt with videos


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    # for a request with a prediction
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def from_usage(cls, usage: TokenUsage) -> Usage:
        counts = usage.counts
        return cls(
            usage.num_prompt,
            usage.num_output,
            usage.num_prompt + usage.num_output,
            PromptTokensDetails(counts.cached, usage.num_images or UNSET, usage.num_videos or UNSET),
            CompletionTokensDetails(usage.num_reasoning, *(usage.predicted or ())),
        )


class Timings(msgspec.Struct):
    """The time of a request by its parts and the engine's clock, under llama.cpp's names. A rate is absent where the
    time is too short to tell, such as that of an output that came in one piece.
    """

    cache_n: int  # prompt tokens found in the prefix cache
    prompt_n: int  # prompt tokens computed
    prompt_ms: float
    predicted_n: int
    predicted_ms: float  # from the first token on
    queued_ms: float
    prompt_per_second: float | UnsetType = UNSET
    predicted_per_second: float | UnsetType = UNSET
    # with drafts
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET

    @classmethod
    def from_requests(cls, usage: TokenUsage, timings: Sequence[RequestTiming]) -> Timings:
        """Return the timings of all prompts and choices together; `timings` has one per prompt."""
        ran = [one for one in timings if one.scheduled and one.first_token]
        queued = max((one.scheduled - one.queued for one in ran), default=0.0)
        prompt = max((one.first_token for one in ran), default=0.0) - min((one.scheduled for one in ran), default=0.0)
        decode = max((one.finished for one in ran), default=0.0) - min((one.first_token for one in ran), default=0.0)
        counts, num_computed = usage.counts, sum(one.num_prefill_computed for one in ran)
        num_drafts = counts.accepted + counts.rejected
        found = cls(
            counts.cached, num_computed, _ms(prompt), usage.num_output, _ms(decode), _ms(queued),
            _rate(num_computed, prompt), _rate(usage.num_output - 1, decode),
        )  # fmt: skip
        if num_drafts:
            found.draft_n, found.draft_n_accepted = num_drafts, counts.accepted
        return found


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 3)


def _rate(num_tokens: int, seconds: float) -> float | UnsetType:
    return round(num_tokens / seconds, 2) if num_tokens > 0 and seconds >= _SHORTEST else UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists; the first prompt token of an echo has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where each token begins, in characters of `text`


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # token id -> entry; null for the first token


class FunctionCall(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class CustomCall(msgspec.Struct):
    name: str | UnsetType
    input: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ResponseMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call has everything, its arguments empty; the others have index and arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A text completion, or a chunk of its stream, whose `usage` is null or absent until the last."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int | None  # null while loading
    capabilities: list[str] = []  # Ollama's names; empty while loading
    owned_by: str = "quire"
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail
