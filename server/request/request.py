"""The dialect-neutral request. A dialect, or the offline `LLM`, fills in a `GenerationSpec`;
`prepare.py` turns it into the requests for the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.messages import NoRepeatNgram, Transfer
from quire.server.lora.served import Chosen
from quire.server.media.inputs import MEDIA, MediaInput
from quire.server.request.fields import SamplingFields
from quire.server.request.limits import (
    MAX_CHOSEN_IDS,
    AllowedTokenIds,
    AtLeastMinusOne,
    BadWords,
    Bias,
    Count,
    NonNegative,
    Stop,
    Stops,
    StopTokenIds,
)
from quire.server.request.tools import Reasoning, Tool, ToolChoice
from quire.server.structured.structure import Structure
from quire.server.values import Json


class GenerationOptions(SamplingFields, kw_only=True):
    """Parameters of generation. None means "not given": the model's default applies, else OpenAI's.

    The types carry the bounds for `msgspec.convert`; the constructor does not check them.
    """

    n: Count = 1
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=MAX_CHOSEN_IDS)] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    no_repeat_ngram: NoRepeatNgram | None = None  # `no_repeat_ngram_size` of a logits processor of another server
    # stopping
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # drafts
    speculation: bool | None = None  # False: none
    prediction: str | None = None  # a text that the output is likely to repeat
    # results
    logprobs: AtLeastMinusOne | None = None  # alternatives per sampled token; -1: the whole vocabulary
    prompt_logprobs: AtLeastMinusOne | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    # the prompt
    truncate_prompt_tokens: AtLeastMinusOne | None = None  # -1: leave room for max_tokens
    truncation_side: Literal["left", "right"] | None = None


def options_of(body: msgspec.Struct, **others: Json) -> GenerationOptions:
    """Return the options that `body` has as attributes of the same names, and `others`, which win."""
    return GenerationOptions(
        **{name: getattr(body, name) for name in _shared(type(body)) if name not in others}, **others
    )


@functools.cache
def _shared(cls: type[msgspec.Struct]) -> list[str]:
    return [name for name in GenerationOptions.__struct_fields__ if name in cls.__struct_fields__]


@dataclass(slots=True)
class Conversation:
    """A prompt that a chat template renders. `messages` have the form that templates expect; an image is the part
    {"type": "image", "image": MediaInput}, a video {"type": "video", "video": MediaInput}.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    reasoning: Reasoning = field(default_factory=Reasoning)
    parse: bool = True  # tell reasoning and tool calls from content; False: the answer is the text alone
    processor_options: dict[str, Any] | None = None  # how the model's image processor sizes images
    frame_options: dict[str, Any] = field(default_factory=dict)  # how many frames of videos it sees

    @property
    def media(self) -> list[MediaInput]:
        """Return the images and videos in the order of the messages."""
        return [
            part[part["type"]]
            for message in self.messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] in MEDIA
        ]


@dataclass(slots=True, kw_only=True)
class GenerationSpec:
    """One request: `options.n` choices for each prompt.

    `prompts` are texts, or token ids, or one conversation. `prompt_param`, `max_tokens_param` and `logprobs_param` are
    the names that the client knows, for error messages.
    """

    request_id: str
    prompts: list[str] | list[list[int]] | Conversation
    options: GenerationOptions
    structure: Structure | None = None  # constraint on the output
    default_max_tokens: int | None = None  # if neither the request nor the model sets one; None: the whole context
    add_special_tokens: bool | None = None  # default: True for texts, False for conversations
    # the texts' continuations belong between them and this one; for models that were trained to fill in
    suffix: str | None = None
    media: list[MediaInput] = field(default_factory=list)  # for one text, which holds their placeholders
    processor_options: dict[str, Any] | None = None  # as in `Conversation`
    context: list[tuple[str, str]] = field(default_factory=list)  # with a suffix: (name, text) of other files
    echo: bool = False  # the answer begins with the prompt, and with its log-probabilities if `logprobs` is set
    priority: int = 0
    cache_salt: str | None = None
    cache_key: str | None = None  # the conversation whose cached prefix is wanted for `cache_seconds`
    cache_seconds: float = 0.0
    tenant: str | None = None  # requests of different tenants share no cached prefixes
    background: bool = False  # yields to every request that is not; no limit of the queue counts it
    adapters: list[Chosen] = field(default_factory=list)  # for LoRA
    prompt_param: str = "prompt"
    max_tokens_param: str = "max_tokens"
    # defaults of sampling, where neither the request nor the model's files have a value; None: the format's, or
    # OpenAI's
    dialect_defaults: Mapping[str, Any] | None = None
    transfer: Transfer | None = None  # blocks of the prompt that go to another server, or are at one
    clip_max_tokens: bool = False  # a max_tokens above the context length is reduced, not refused
    logprobs_param: str = "logprobs"
