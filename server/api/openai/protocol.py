"""Contract 1, client <-> server: the OpenAI request and response types, with vLLM's extensions under vLLM's names.

A field that is `None` was absent or null, which mean the same. Every list, text and number has its range in its type,
so that the parser, its messages and the OpenAPI document agree, and later code can rely on it. Fields a request type
does not declare fall in four classes (see `parse_body.py`): `harmless` ones change nothing about the answer and are
accepted; `hints` are accepted and named in a `Warning` header, `unsupported` ones mean something we cannot do and are
refused, both unless they hold a neutral value (null, or one listed); any other is unknown, and answered with a
`Warning` header, or refused under `--strict-params`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.server.api.openai.tools import (
    CalledFunction,
    CallId,
    Choice,
    FunctionChoice,
    Functions,
    MessageToolCalls,
    Tools,
)
from quire.server.lora.fields import LoraScales
from quire.server.request.fields import SamplingFields
from quire.server.request.limits import (
    INT64_MAX,
    MAX_CHOSEN_IDS,
    MAX_IDS,
    MAX_PROMPTS,
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_KWARGS_BYTES,
    AllowedTokenIds,
    AtLeastMinusOne,
    BadWords,
    Bias,
    CacheSalt,
    Count,
    Frames,
    FramesPerSecond,
    ImageName,
    ImageText,
    Int64,
    NonNegative,
    ProcessorOptions,
    RepetitionPenalty,
    Stop,
    Stops,
    StopTokenIds,
    Template,
    Text,
    TokenId,
    TokenIds,
)
from quire.server.request.ngrams import NgramArguments
from quire.server.request.ollama_options import Format, Options, Think
from quire.server.request.tools import EFFORTS
from quire.server.structured.structure import MAX_BYTES

MAX_TOKENIZE = 2**21  # characters of a text for /tokenize
MAX_FIELDS = 1_000  # per JSON Schema, at its top
MAX_CHOICES = 10_000  # texts of which the output must be one
MAX_MESSAGES, MAX_PARTS = 10_000, 1_000
MAX_DOCUMENTS, MAX_DOCUMENT_FIELDS = 1_000, 64
ROLES = ["system", "developer", "user", "assistant", "tool", "function"]

Name = Annotated[str, Meta(max_length=256)]
Effort = Literal[EFFORTS]
TemplateKwargs = Annotated[
    dict[Name, Any],
    Meta(max_length=MAX_TEMPLATE_KWARGS, description=f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON"),
]
# a JSON Schema or a structural tag; as text, its JSON. Its size is checked when it is compiled.
JsonObject = Annotated[dict[Name, Any], Meta(max_length=MAX_FIELDS)]
JsonText = Annotated[str, Meta(max_length=MAX_BYTES)]
Document = Annotated[
    dict[Name, Text | Int64 | Annotated[float, Meta(ge=-1e300, le=1e300)] | bool | None],
    Meta(max_length=MAX_DOCUMENT_FIELDS),
]
Documents = Annotated[list[Document], Meta(max_length=MAX_DOCUMENTS)]
Prompts = Annotated[
    list[Text | TokenId | TokenIds],
    Meta(min_length=1, max_length=MAX_IDS, description=f"token ids of one prompt, or at most {MAX_PROMPTS} prompts"),
]

Choices = Annotated[list[Annotated[Text, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "guided_decoding_backend",  # one library serves every structure
    }
)
# for another server's books, or for a way of working that is not here
HINTS: dict[str, tuple] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "verbosity": ("medium",),
    "stream_interval": (1,),
    "length_penalty": (1.0,),  # for beams
    "early_stopping": (False,),
    # llama.cpp's: blocks of the cache have no slots, and a prompt is never cut in its middle
    "id_slot": (-1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "keep_alive": (),
}
UNSUPPORTED: dict[str, tuple] = {
    # other ways to search or sample
    "use_beam_search": (False,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "logprobs_mode": (),
    "repetition_detection": (),
    "watermarking": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    # other inputs and outputs
    "prompt_embeds": (),
    "lora_path": (),
    "ec_transfer_params": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_meta_info": (False,),
    "moderation": (),  # a client that asks for it relies on it
}
# for conversations; a text completion has neither
TOOLS: dict[str, tuple] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
}
REASONING: dict[str, tuple] = {
    "reasoning_effort": ("none",),
    "reasoning": (),
    "include_reasoning": (),
    "thinking_token_budget": (),
    "separate_reasoning": (),
    "stream_reasoning": (),
    "enable_thinking": (False,),
    "reasoning_format": ("none",),
    "think": (False,),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    harmless: ClassVar = frozenset({"include_obfuscation"})
    unsupported: ClassVar[dict[str, tuple]] = {}


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """Every prefix is cached; `ttl` is read with the other hints of the cache (`cache_hint.py`)."""

    harmless: ClassVar = frozenset({"mode"})
    unsupported: ClassVar[dict[str, tuple]] = {}
    hints: ClassVar[dict[str, tuple]] = {"ttl": ("30m", "12h"), "prewarm": (False,), "comparison_response_id": ()}


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's constraint on the output: exactly one of the first six."""

    json: JsonObject | bool | JsonText | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | JsonText | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Text | None = None
    additional_properties: bool | None = None  # quire's: objects may have properties that their schema does not name

    harmless: ClassVar = frozenset({"disable_fallback", "disable_additional_properties"})


class VideoIO(msgspec.Struct, kw_only=True):
    """The frames of a video; with both, the fewer ones count."""

    num_frames: Frames | None = None
    fps: FramesPerSecond | None = None

    harmless: ClassVar = frozenset()


class MediaIO(msgspec.Struct, kw_only=True):
    """vLLM's choice of how media are read, by kind."""

    video: VideoIO | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {"image": ({},), "audio": ({},)}


class PredictionPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: Text

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the output is likely to repeat: a source of drafts."""

    type: Literal["content"]
    content: Text | Annotated[list[PredictionPart], Meta(max_length=MAX_PARTS)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationFields(SamplingFields, kw_only=True):
    """Fields of chat and text completions."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling
    n: Count | None = None
    logit_bias: Annotated[dict[Annotated[str, Meta(max_length=20)], Bias], Meta(max_length=MAX_CHOSEN_IDS)] | None = (
        None
    )
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    vllm_xargs: NgramArguments | None = None
    custom_logit_processor: Text | None = None  # SGLang's for DeepSeek-OCR
    custom_params: NgramArguments | None = None
    # llama.cpp's and Ollama's names (`other_names.py`)
    repeat_penalty: RepetitionPenalty | None = None  # repetition_penalty, over the last 64 tokens
    n_predict: Annotated[int, Meta(ge=-2, le=INT64_MAX)] | None = None  # max_tokens; -1: all that the context holds
    n_probs: NonNegative | None = None  # top_logprobs
    cache_prompt: bool | None = None  # false: compute the whole prompt
    format: Format = None  # response_format
    options: Options | None = None
    # stopping
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # constraint on the output (`structure.py`)
    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | bool | JsonText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    json_schema: JsonObject | bool | JsonText | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=0, le=1e9)] | None = None  # from the first token on; 0 is no limit
    # drafts (`docs/speculation.md`), which change no text
    speculation: bool | None = None
    prediction: Prediction | None = None
    # results
    prompt_logprobs: AtLeastMinusOne | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None  # for the prompt, in comments of the stream
    return_timings: bool | None = None  # llama.cpp's `timings`, in the answer or its last chunk
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    # the prompt
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: AtLeastMinusOne | None = None  # -1: all that the context holds
    truncation_side: Literal["left", "right"] | None = None
    # the queue and the cache
    prompt_cache_options: PromptCacheOptions | None = None
    priority: Int64 | None = None  # lower runs first
    cache_salt: CacheSalt | None = None
    lora: LoraScales | None = None  # llama.cpp's: adapters, if `model` names none
    request_id: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$(?![\s\S])")] | None = None
    kv_transfer_params: JsonObject | None = None  # vLLM's: blocks of the prompt on another server (`transfer.py`)


class ImageUrl(msgspec.Struct, kw_only=True):
    """`url` is a data: URL, or one that the server's settings allow; it may be left out for a part whose `uuid` is
    cached.
    """

    url: ImageText | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None  # original counts as high

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class VideoUrl(msgspec.Struct, kw_only=True):
    """`url` is a data: URL, or one that the server's settings allow; it may be left out for a part whose `uuid` is
    cached.
    """

    url: ImageText | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


READ_PARTS = frozenset({"text", "refusal", "image_url", "video_url"})


class ContentPart(msgspec.Struct, kw_only=True):
    type: Name
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | ImageText | None = None
    video_url: VideoUrl | ImageText | None = None
    uuid: ImageName | None = None  # under which an image or a video is cached

    harmless: ClassVar = frozenset({"cache_control", "annotations"})
    unsupported: ClassVar[dict[str, tuple]] = {
        "input_audio": (),
        "audio_url": (),
        "file": (),
        "image": (),
        "video": (),
        "audio": (),
    }


class SpokenAnswer(msgspec.Struct, kw_only=True):
    """The assistant's spoken words: its text, or only its id at another server."""

    id: Name | None = None
    transcript: Text | None = None

    harmless: ClassVar = frozenset({"data", "expires_at"})
    unsupported: ClassVar[dict[str, tuple]] = {}


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(max_length=256, extra_json_schema={"enum": ROLES})]
    content: Text | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    refusal: Text | None = None
    # for the assistant: calls, the older form of one call, and its thoughts, under either name
    tool_calls: MessageToolCalls | None = None
    function_call: CalledFunction | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_call_id: CallId | None = None  # in the result of a tool
    audio: SpokenAnswer | None = None

    harmless: ClassVar = frozenset({"annotations", "reasoning_details"})
    unsupported: ClassVar[dict[str, tuple]] = {}

    def parts(self) -> dict[int, ContentPart]:
        """Return the parts of the content that the model reads, by place: of the assistant's those with text, whatever
        server made them.
        """
        parts = dict(enumerate(self.content)) if isinstance(self.content, list) else {}
        if self.role != "assistant":
            return parts
        return {
            i: part if part.type in READ_PARTS else ContentPart(type="text", text=part.text)
            for i, part in parts.items()
            if part.type in READ_PARTS or part.text is not None
        }

    def without_effect(self) -> dict[str, str]:
        has_transcript = self.audio is None or (self.content is None and self.audio.transcript)
        out = {} if has_transcript else {"audio": ""}
        if self.role == "assistant" and isinstance(self.content, list):
            read = self.parts()
            out |= {f"content.{i}": part.type for i, part in enumerate(self.content) if i not in read}
        return out


class ReasoningSwitch(msgspec.Struct, kw_only=True):
    """SGLang's and OpenRouter's `reasoning`."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: NonNegative | None = None
    exclude: bool | None = None

    harmless: ClassVar = frozenset({"summary"})
    unsupported: ClassVar[dict[str, tuple]] = {}


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: AtLeastMinusOne | None = None
    # rendering of the messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None  # only with --trust-request-chat-template
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    mm_processor_kwargs: ProcessorOptions | None = None  # sizes of images
    media_io_kwargs: MediaIO | None = None  # frames of videos
    # tools; `functions` and `function_call` are their older form
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    # thinking
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: AtLeastMinusOne | None = None  # -1: no limit
    enable_thinking: bool | None = None
    reasoning: ReasoningSwitch | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    think: Think = None  # Ollama's

    harmless: ClassVar = HARMLESS
    hints: ClassVar[dict[str, tuple]] = HINTS
    unsupported: ClassVar[dict[str, tuple]] = UNSUPPORTED | {
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "echo": (False,),
        "suffix": (),
        "best_of": (),
    }


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions"""

    prompt: Text | Prompts
    echo: bool | None = None
    best_of: Count | None = None  # n itself; more at temperature 0
    logprobs: AtLeastMinusOne | None = None
    suffix: Text | None = None  # for models with tokens for filling in the middle

    harmless: ClassVar = HARMLESS
    hints: ClassVar[dict[str, tuple]] = HINTS | REASONING
    unsupported: ClassVar[dict[str, tuple]] = UNSUPPORTED | TOOLS | {"mm_processor_kwargs": ()}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: Annotated[str, Meta(max_length=MAX_TOKENIZE)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages, whose template writes them
    return_token_strs: bool | None = None
    # with `messages`, as for a chat completion
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None  # only with --trust-request-chat-template
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaIO | None = None
    tools: Tools | None = None

    harmless: ClassVar = HARMLESS
    unsupported: ClassVar[dict[str, tuple]] = {}
    hints: ClassVar[dict[str, tuple]] = HINTS


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: TokenIds
    model: Name | None = None

    harmless: ClassVar = HARMLESS
    unsupported: ClassVar[dict[str, tuple]] = {}
    hints: ClassVar[dict[str, tuple]] = HINTS
