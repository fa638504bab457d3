"""Anthropic's request and response types of /v1/messages. Fields are classed as in `server/api/openai/protocol.py`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.api.anthropic import foreign_blocks
from quire.server.api.anthropic.block import NOTHING, OF_BLOCK, BaseBlock, CacheControl, JsonObject, Name
from quire.server.request.limits import (
    MAX_STOP,
    AtLeastMinusOne,
    CacheSalt,
    ImageText,
    NonNegative,
    Stop,
    Temperature,
    Text,
    TopP,
)
from quire.server.values import Json

MAX_MESSAGES, MAX_BLOCKS, MAX_TOOLS = 10_000, 1_000, 1024
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:/-]+$(?![\s\S])")]


class TextBlock(BaseBlock, tag="text"):
    text: Text

    harmless: ClassVar = OF_BLOCK | {"citations"}


class _Source(msgspec.Struct, kw_only=True, tag_field="type"):
    harmless: ClassVar = frozenset({"type"})
    unsupported: ClassVar = NOTHING


class Base64Source(_Source, tag="base64"):
    data: ImageText
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff"] | None = None


class UrlSource(_Source, tag="url"):
    url: ImageText


class ImageBlock(BaseBlock, tag="image"):
    source: Base64Source | UrlSource


class ThinkingBlock(BaseBlock, tag="thinking"):
    thinking: Text
    signature: Text | None = None


class ToolUse(BaseBlock, tag="tool_use"):
    id: Name
    name: Name
    input: JsonObject

    harmless: ClassVar = OF_BLOCK | {"caller"}


class ToolResult(BaseBlock, tag="tool_result"):
    tool_use_id: Name
    content: (
        Text | Annotated[list[TextBlock | ImageBlock | foreign_blocks.OfResult], Meta(max_length=MAX_BLOCKS)] | None
    ) = None
    is_error: bool | None = None

    harmless: ClassVar = OF_BLOCK | {"toolset_name"}

    def unread(self) -> dict[int, str]:
        """Return the places and types of the blocks that no prompt has."""
        return foreign_blocks.left_out(self.content) if isinstance(self.content, list) else {}

    def without_effect(self) -> dict[str, str]:
        return {f"content.{i}": kind for i, kind in self.unread().items()}


Block = (
    TextBlock | ImageBlock | ThinkingBlock | ToolUse | ToolResult | foreign_blocks.OfAssistant | foreign_blocks.OfResult
)
TextBlocks = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Meta(max_length=MAX_BLOCKS)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = NOTHING

    def unread(self) -> dict[int, str]:
        """Return the places and types of the blocks that no prompt has."""
        return foreign_blocks.left_out(self.content) if isinstance(self.content, list) else {}

    def without_effect(self) -> dict[str, str]:
        return {f"content.{i}": kind for i, kind in self.unread().items()}


class Tool(msgspec.Struct, kw_only=True):
    name: ToolName
    input_schema: JsonObject | None = None
    description: Annotated[str, Meta(max_length=2**17)] | None = None
    type: Name | None = None  # only "custom": the others are tools that Anthropic runs
    strict: bool | None = None
    cache_control: CacheControl | None = None

    harmless: ClassVar = frozenset({"eager_input_streaming"})
    unsupported: ClassVar = NOTHING
    hints: ClassVar[dict[str, tuple]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = NOTHING


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]  # between_tools: as adaptive
    budget_tokens: NonNegative | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = NOTHING
    hints: ClassVar[dict[str, tuple]] = {"display": ("summarized",)}  # thoughts are sent in any case


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = NOTHING


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = NOTHING
    hints: ClassVar[dict[str, tuple]] = {"task_budget": ()}


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields that form the prompt."""

    model: Name
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of `output_config.format`
    cache_control: CacheControl | None = None  # as that of the last block

    harmless: ClassVar = frozenset({"metadata", "betas", "user_profile_id"})
    unsupported: ClassVar[dict[str, tuple]] = {"mcp_servers": ([],)}
    hints: ClassVar[dict[str, tuple]] = {
        "service_tier": ("auto", "standard_only"),
        "inference_geo": (),
        "context_management": ({}, {"edits": []}),
        "container": (),
        "speed": ("standard",),
    }


class MessagesRequest(PromptFields, kw_only=True):
    """POST /v1/messages"""

    max_tokens: NonNegative  # 0: the prompt is computed, for the cache
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOP)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: AtLeastMinusOne | None = None
    cache_salt: CacheSalt | None = None  # in addition to Anthropic's own
    speculation: bool | None = None  # false: no drafts (`docs/speculation.md`)
    return_progress: bool | None = None  # for the prompt, in comments of the stream
    kv_transfer_params: JsonObject | None = None  # vLLM's, as in chat

    unsupported: ClassVar[dict[str, tuple]] = PromptFields.unsupported | {"prediction": ()}


class CountTokensRequest(PromptFields, kw_only=True):
    """POST /v1/messages/count_tokens"""


# ---- responses


class CacheCreation(msgspec.Struct, kw_only=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int  # without those of the other two
    output_tokens: int
    cache_read_input_tokens: int = 0
    # for a request with cache_control: tokens that were not cached and are now, so that the same prompt reads them
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | UnsetType = UNSET


class ContentBlock(msgspec.Struct, kw_only=True):
    """text, thinking or tool_use."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET  # for thinking; nothing is signed here
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Json = UNSET


class MessageResponse(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    ) = None
    stop_sequence: str | None = None
    usage: MessageUsage
    kv_transfer_params: dict[str, Json] | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicError
