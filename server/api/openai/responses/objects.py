"""The objects of /v1/responses: the response and its items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.openai.objects import ChatTokenLogprob
from quire.server.api.openai.responses.protocol import (
    ReasoningOptions,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: ItemStatus = "in_progress"


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: ItemStatus = "in_progress"


class OutputCustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""
    status: ItemStatus = "in_progress"


class OutputCompaction(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    id: str
    encrypted_content: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall | OutputCompaction


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | UnsetType = UNSET  # for a prompt with images
    video_tokens: int | UnsetType = UNSET  # for a prompt with videos


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    # for a request with a prediction
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class ConversationId(msgspec.Struct, kw_only=True):
    id: str


class ResponseText(msgspec.Struct, kw_only=True):
    format: TextFormat
    verbosity: str = "medium"


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    conversation: ConversationId | None = None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str]
    service_tier: Literal["default"] = "default"
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class DeletedObject(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool = True


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
