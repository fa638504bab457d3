"""Requests of /v1/responses. Fields are classed as in `server/api/openai/protocol.py`."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.api.openai.protocol import (
    HARMLESS,
    HINTS,
    MAX_MESSAGES,
    MAX_PARTS,
    UNSUPPORTED,
    Effort,
    JsonObject,
    Prediction,
    PromptCacheOptions,
    TemplateKwargs,
)
from quire.server.api.openai.responses import compaction
from quire.server.api.openai.responses.foreign_items import ForeignFields, is_left_out
from quire.server.api.openai.tools import MAX_GRAMMAR, MAX_TOOLS, CallId, Description, Schema, ToolName
from quire.server.request.fields import with_sampling_fields
from quire.server.request.limits import (
    INT64_MAX,
    AtLeastMinusOne,
    CacheSalt,
    ImageText,
    Int64,
    ProcessorOptions,
    Stop,
    Stops,
    Text,
)
from quire.server.request.ngrams import NgramArguments

Name = Annotated[str, Meta(max_length=256)]
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
# for items that no answer of this server has
INCLUDES_NOTHING = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
Include = Annotated[
    list[Annotated[str, Meta(max_length=256, extra_json_schema={"enum": [*INCLUDED, *INCLUDES_NOTHING]})]],
    Meta(max_length=64),
]
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
READ_PARTS = TEXT_PARTS | {"refusal", "input_image"}
_NOTHING: dict[str, tuple] = {}


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message, of a tool's output, or of thoughts. That of a shell's output has no type."""

    type: Name | None = None
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageText | None = None  # a data: URL, or one that the server's settings allow
    detail: Literal["low", "high", "auto", "original"] | None = None  # for an image; original counts as high
    annotations: Annotated[list[Any], Meta(max_length=MAX_PARTS)] | None = None
    stdout: Text | None = None
    stderr: Text | None = None
    outcome: msgspec.Raw | UnsetType = UNSET  # for a command

    harmless: ClassVar = frozenset({"logprobs", "prompt_cache_breakpoint", "cache_control"})
    unsupported: ClassVar[dict[str, tuple]] = dict.fromkeys(("file_id", "file_url", "file_data", "input_audio"), ())


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class Screenshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The output of a computer."""

    type: Name | None = None
    image_url: ImageText | None = None
    file_id: Name | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class InputItem(ForeignFields, kw_only=True, omit_defaults=True):
    """A message, a call, the output of one, thoughts, or a reference to an item that is stored. `type` may be left out
    of a message.
    """

    type: Name | None = None
    id: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Parts | None = None
    summary: Parts | None = None  # for thoughts
    encrypted_content: Text | None = None
    call_id: CallId | None = None
    name: Name | None = None  # a model may have made it up
    namespace: Name | None = None  # for the tool that is called
    arguments: Text | Schema | None = None
    input: Text | None = None
    output: Text | Parts | Screenshot | None = None
    status: Name | None = None

    harmless: ClassVar = frozenset({"phase", "caller", "created_by", "internal_chat_message_metadata_passthrough"})
    unsupported: ClassVar[dict[str, tuple]] = _NOTHING
    hints: ClassVar[dict[str, tuple]] = {"async": (False,)}

    def parts(self) -> dict[int, InputPart]:
        """Return the parts of the content that the model reads, by place: of the assistant's those with text, whatever
        server made them.
        """
        parts = dict(enumerate(self.content)) if isinstance(self.content, list) else {}
        if self.role != "assistant":
            return parts
        return {
            i: part if part.type in READ_PARTS else InputPart(type="text", text=part.text)
            for i, part in parts.items()
            if part.type in READ_PARTS or part.text is not None
        }

    def without_effect(self) -> dict[str, str]:
        if self.role != "assistant" or not isinstance(self.content, list):
            return {}
        read = self.parts()
        return {f"content.{i}": part.type or "" for i, part in enumerate(self.content) if i not in read}


def left_out_items(items: str | list[InputItem] | None, name: str) -> dict[str, str]:
    """Return the paths of items that are left out of prompts, and their types. `name` is the field that has them."""
    if not isinstance(items, list):
        return {}
    return {f"{name}.{i}": item.type or "" for i, item in enumerate(items) if is_left_out(item)}


Items = Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]


class ResponseToolFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)] | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class NamespacedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function or a custom tool. Tools of the types `left_out`, which agents offer to every model and can do without,
    are ignored.
    """

    left_out: ClassVar = re.compile(
        r"(web_search(_preview)?|local_shell|image_generation|tool_search)(_\d{4}_\d\d_\d\d)?"
    )

    type: Name
    name: ToolName | None = None
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    format: ResponseToolFormat | None = None

    harmless: ClassVar = frozenset({"cache_control"})
    unsupported: ClassVar[dict[str, tuple]] = _NOTHING
    hints: ClassVar[dict[str, tuple]] = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "async": (False,),
        "output_schema": (),
    }


class ResponseTool(NamespacedTool, kw_only=True, omit_defaults=True):
    """The same, or a namespace of others."""

    tools: Annotated[list[NamespacedTool], Meta(max_length=MAX_TOOLS)] | None = None


class ResponseToolReference(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom"]
    name: ToolName

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class ResponseToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tool, or the tools that may be called."""

    type: Name
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponseToolReference], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Description | None = None
    schema: Schema | None = None
    strict: bool | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING
    hints: ClassVar[dict[str, tuple]] = {"verbosity": ("medium",)}


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of thoughts. Any `summary` returns them as one summary, whole."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING
    hints: ClassVar[dict[str, tuple]] = {"mode": ("standard",), "context": ("auto",)}


class ResponseCacheOptions(PromptCacheOptions, kw_only=True):
    prewarm: bool | None = None  # only the prompt is computed

    hints: ClassVar[dict[str, tuple]] = {"ttl": ("30m", "12h"), "comparison_response_id": ()}


class ConversationReference(msgspec.Struct, kw_only=True):
    id: Name

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class ResponsePrompt(msgspec.Struct, kw_only=True):
    """The fields that form the prompt."""

    model: Name | None = None
    input: Text | Items | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationReference | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    # in addition to OpenAI's own, as in chat
    chat_template_kwargs: TemplateKwargs | None = None
    mm_processor_kwargs: ProcessorOptions | None = None

    harmless: ClassVar = HARMLESS
    unsupported: ClassVar[dict[str, tuple]] = {"moderation": ()}
    hints: ClassVar[dict[str, tuple]] = HINTS | {"personality": ()}

    def without_effect(self) -> dict[str, str]:
        return left_out_items(self.input[:-1] if compaction.is_asked(self.input) else self.input, "input")


class InputTokensRequest(ResponsePrompt, kw_only=True):
    """POST /v1/responses/input_tokens"""


class ResponsesRequest(with_sampling_fields(ResponsePrompt), kw_only=True):
    """POST /v1/responses"""

    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    include: Include | None = None
    max_output_tokens: Positive | None = None
    metadata: Metadata | None = None
    top_logprobs: AtLeastMinusOne | None = None
    # in addition to OpenAI's own, as in chat
    stop: Stop | Stops | None = None
    vllm_xargs: NgramArguments | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    speculation: bool | None = None
    prediction: Prediction | None = None
    return_progress: bool | None = None
    kv_transfer_params: JsonObject | None = None

    # `max_tool_calls` counts the calls of tools that the server runs; it runs none
    harmless: ClassVar = HARMLESS | {"max_tool_calls", "stream_options", "access_programs", "client_metadata"}
    unsupported: ClassVar[dict[str, tuple]] = UNSUPPORTED | {"prompt": (), "modalities": (["text"],)}
    hints: ClassVar[dict[str, tuple]] = ResponsePrompt.hints | {"context_management": ([],), "image": ()}


class ConversationRequest(msgspec.Struct, kw_only=True):
    """POST /v1/conversations"""

    items: Items | None = None
    metadata: Metadata | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING

    def without_effect(self) -> dict[str, str]:
        return left_out_items(self.items, "items")


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}"""

    metadata: Metadata

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class NewItems(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}/items"""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING

    def without_effect(self) -> dict[str, str]:
        return left_out_items(self.items, "items")
