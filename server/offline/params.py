"""The parameters and results of the offline `LLM`, with vLLM's names and defaults."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec

from quire.server.api.openai.objects import PromptLogprob
from quire.server.api.openai.protocol import StructuredOutputs
from quire.server.api.openai.structure import from_options
from quire.server.errors import BadRequest
from quire.server.http.parse_body import bad_request
from quire.server.request.fields import NEUTRAL, SamplingFields
from quire.server.request.ngrams import NgramArguments, from_vllm
from quire.server.request.request import GenerationOptions
from quire.server.structured.structure import Structure

T = TypeVar("T")


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint on the output: exactly one of the first six, as in a request's `structured_outputs`. Raises
    ValueError.
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    additional_properties: bool = False  # objects may have properties that their schema does not name

    def __post_init__(self) -> None:
        self.to_structure()

    def to_structure(self) -> Structure:
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            return from_options(converted(fields, StructuredOutputs, "structured_outputs."), "structured_outputs")
        except BadRequest as error:
            raise ValueError(error.message) from None


class SamplingParams(SamplingFields, kw_only=True):
    """Parameters of generation. Raises ValueError naming the parameter and its limit.

    `max_tokens=None` is all that the context holds; `top_k` 0 or -1 is off; `logprobs` is the number of most likely
    tokens to report in addition to the sampled one.
    """

    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None  # for the processor for DeepSeek-OCR: ngram_size, window_size ...

    def __post_init__(self) -> None:
        for name, value in NEUTRAL.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        self.to_options()

    def to_options(self) -> GenerationOptions:
        """Return the same parameters in dialect-neutral form. Raises ValueError for a type or a bound."""
        fields = {
            name: value
            for name in self.__struct_fields__
            if name not in ("structured_outputs", "extra_args") and (value := getattr(self, name)) is not None
        }
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: must be a finite number, got {value}")
        options = converted(fields, GenerationOptions)
        options.no_repeat_ngram = from_vllm(_ngram_arguments(self.extra_args))
        return options


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt. `logprobs` maps token ids to log-probabilities, at every position."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, PromptLogprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers. `num_cached_tokens` of the prompt were found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


def converted(value: object, cls: type[T], path: str = "") -> T:
    """Return `value` checked against the type `cls`. Raises ValueError naming the field, below `path`."""
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise ValueError(path + bad_request(error, value).message) from None


def _ngram_arguments(given: dict[str, Any] | None) -> NgramArguments | None:
    if given is None:
        return None
    for name in given.keys() - NgramArguments.__struct_fields__:
        known = ", ".join(NgramArguments.__struct_fields__)
        raise ValueError(f"extra_args.{name} is not supported; supported: {known}")
    lists = {
        name: list(value) if isinstance(value, set | frozenset | tuple) else value for name, value in given.items()
    }
    return converted(lists, NgramArguments, "extra_args.")
