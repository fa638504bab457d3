"""Ollama's request types, and the types that describe its answers. Fields are classed as in
`server/api/openai/protocol.py`. Answers are built as plain objects, because most of their fields come and go.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.request.limits import MAX_PROMPTS, ImageText, Text
from quire.server.request.ollama_options import Format, Json, Options, Think
from quire.server.request.progress import PromptProgress

MAX_MESSAGES, MAX_CALLS, MAX_TOOLS, MAX_IMAGES = 10_000, 1024, 1024, 1024
Name = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:/-]+$(?![\s\S])")]
KeepAlive = Annotated[str, Meta(max_length=64)] | float | None
Images = Annotated[list[ImageText], Meta(max_length=MAX_IMAGES, description="images in base64")]
_NOTHING: dict[str, tuple] = {}


class _Generation(msgspec.Struct, kw_only=True):
    model: Name
    stream: bool | None = None  # default: true
    format: Format = None
    options: Options | None = None
    think: Think = None
    keep_alive: KeepAlive = None  # how long the cached prefix of the prompt is wanted
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # alternatives per token, with `logprobs`
    speculation: bool | None = None  # false: no drafts (`docs/speculation.md`)
    return_progress: bool | None = None  # for the prompt, in lines with `prompt_progress`

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {"prediction": ()}
    hints: ClassVar[dict[str, tuple]] = {"shift": (False,), "truncate": (False,)}  # a long prompt is never cut here


class CallFunction(msgspec.Struct, kw_only=True):
    name: Name
    arguments: Json

    harmless: ClassVar = frozenset({"index", "description"})
    unsupported: ClassVar = _NOTHING


class Call(msgspec.Struct, kw_only=True):
    function: CallFunction
    id: Name | None = None

    harmless: ClassVar = frozenset({"type"})
    unsupported: ClassVar = _NOTHING


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None  # before the text
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: Name | None = None  # for a result
    tool_call_id: Name | None = None
    name: Name | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class DefinedFunction(msgspec.Struct, kw_only=True):
    name: ToolName
    description: Annotated[str, Meta(max_length=2**17)] | None = None
    parameters: Json | None = None

    harmless: ClassVar = frozenset({"strict"})
    unsupported: ClassVar = _NOTHING


class ChatTool(msgspec.Struct, kw_only=True):
    function: DefinedFunction
    type: Literal["function"] = "function"

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NOTHING


class ChatRequest(_Generation, kw_only=True):
    """POST /api/chat"""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None  # none: load the model
    tools: Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)] | None = None

    unsupported: ClassVar[dict[str, tuple]] = _Generation.unsupported | {"images": ([],)}


class GenerateRequest(_Generation, kw_only=True):
    """POST /api/generate"""

    prompt: Text | None = None  # none: load the model
    system: Text | None = None
    images: Images | None = None  # before the prompt; with `raw`, at the placeholders in it
    raw: bool | None = None  # the prompt is used without a template

    unsupported: ClassVar[dict[str, tuple]] = _Generation.unsupported | {
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
    }


class EmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed"""

    model: Name
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)]
    truncate: bool | None = None  # default: true
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    keep_alive: KeepAlive = None

    harmless: ClassVar = frozenset({"options"})
    unsupported: ClassVar = _NOTHING


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, the older form of /api/embed for one text"""

    model: Name
    prompt: Text
    keep_alive: KeepAlive = None

    harmless: ClassVar = frozenset({"options"})
    unsupported: ClassVar = _NOTHING


class ShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show"""

    model: Name | None = None
    name: Name | None = None  # the older name of `model`

    harmless: ClassVar = frozenset({"verbose"})
    unsupported: ClassVar[dict[str, tuple]] = {"system": ("",), "template": ("",), "options": ({},)}


# ---- answers


class OllamaErrorResponse(msgspec.Struct):
    error: str


class AnsweredFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]
    index: int


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    function: AnsweredFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    """Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ChatAnswer(_Answer, kw_only=True):
    message: AnswerMessage


class GenerateAnswer(_Answer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class LibraryModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(LibraryModel, kw_only=True):
    expires_at: str
    size_vram: int
    context_length: int


class TagsAnswer(msgspec.Struct):
    models: list[LibraryModel]


class RunningAnswer(msgspec.Struct):
    models: list[RunningModel]


class ShowAnswer(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: str | UnsetType = UNSET
    license: str | UnsetType = UNSET
    messages: list[dict[str, str]] | UnsetType = UNSET


class VersionAnswer(msgspec.Struct):
    version: str  # for Ollama's API
    quire: str
