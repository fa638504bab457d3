"""POST /generate as TGI (`inputs`) and as SGLang (`text`, `input_ids`) take it: a way in for clients of these servers.
Fields are classed as in `server/api/openai/protocol.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.request.fields import SamplingFields
from quire.server.request.limits import (
    MAX_IDS,
    MAX_PROMPTS,
    Count,
    Int64,
    NonNegative,
    Penalty,
    RepetitionPenalty,
    Stop,
    Stops,
    StopTokenIds,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    TopP,
    TypicalP,
)
from quire.server.request.ngrams import NgramArguments

AdapterName = Annotated[str, Meta(max_length=256)]
_NOTHING: dict[str, tuple] = {}


class Parameters(msgspec.Struct, kw_only=True):
    """The parameters of TGI."""

    max_new_tokens: NonNegative | None = None
    do_sample: bool | None = None  # false, and no temperature: greedy
    temperature: Temperature | None = None
    top_k: NonNegative | None = None
    top_p: TopP | None = None
    typical_p: TypicalP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Int64 | None = None
    stop: Stops | None = None
    truncate: NonNegative | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    adapter_id: AdapterName | None = None  # a LoRA adapter
    best_of: Count | None = None  # 1; more without sampling

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {
        "watermark": (False,),
        "decoder_input_details": (False,),
        "top_n_tokens": (0,),
        "grammar": (),
    }


class SamplingParameters(SamplingFields, kw_only=True):
    """The parameters of SGLang."""

    max_new_tokens: NonNegative | None = None
    min_new_tokens: NonNegative | None = None
    n: Count | None = None
    seed: Int64 | None = msgspec.field(default=None, name="sampling_seed")
    custom_params: NgramArguments | None = None  # for custom_logit_processor
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: Text | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {
        "structural_tag": (),
        "no_stop_trim": (False,),
        "stop_regex": (),
        "logit_bias": (),
    }
    hints: ClassVar[dict[str, tuple]] = {"stream_interval": (1,)}


class TextRequest(msgspec.Struct, kw_only=True):
    """POST /generate: exactly one of `inputs`, `text` and `input_ids`."""

    inputs: Text | None = None
    parameters: Parameters | None = None
    text: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1, max_length=MAX_IDS)] | None = None
    sampling_params: SamplingParameters | None = None
    stream: bool | None = None
    custom_logit_processor: Text | None = None  # that for DeepSeek-OCR
    rid: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$(?![\s\S])")] | None = None
    priority: Int64 | None = None
    speculation: bool | None = None  # false: no drafts (`docs/speculation.md`)
    return_progress: bool | None = None  # for the prompt, in comments of the stream
    lora_path: AdapterName | None = None  # the name of a LoRA adapter

    harmless: ClassVar = frozenset({"log_metrics"})
    unsupported: ClassVar[dict[str, tuple]] = {
        "prediction": (),
        "return_logprob": (False,),
        "logprob_start_len": (-1,),
        "top_logprobs_num": (0,),
        "token_ids_logprob": (),
        "return_text_in_logprobs": (False,),
        "return_hidden_states": (False,),
        "image_data": (),
        "audio_data": (),
        "video_data": (),
        "input_embeds": (),
        "session_params": (),
        "bootstrap_host": (),
    }


# ---- answers


class TextToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    special: bool


class TextDetails(msgspec.Struct, kw_only=True):
    finish_reason: str | None
    generated_tokens: int
    seed: int | None
    prefill: list[TextToken] = []
    tokens: list[TextToken] = []


class GeneratedText(msgspec.Struct, kw_only=True):
    """TGI's."""

    generated_text: str
    details: TextDetails | UnsetType = UNSET


class FinishedBy(msgspec.Struct, kw_only=True):
    type: str
    length: int | UnsetType = UNSET
    matched: int | str | UnsetType | None = UNSET


class TextMeta(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: FinishedBy | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float  # in seconds


class TextOutput(msgspec.Struct, kw_only=True):
    """SGLang's."""

    text: str
    output_ids: list[int]
    meta_info: TextMeta
