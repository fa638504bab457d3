"""llama.cpp's and Ollama's field names in OpenAI bodies, kept by clients that change servers."""

from __future__ import annotations

import secrets

import msgspec

from quire.server.api.openai.protocol import ChatCompletionRequest, GenerationFields
from quire.server.api.openai.structure import structure_of
from quire.server.errors import BadRequest
from quire.server.request.fields import SamplingFields
from quire.server.request.samplers import LAST_TOKENS
from quire.server.structured.structure import Structure
from quire.server.values import Json


def translate_names(body: GenerationFields) -> None:
    """Copy the values of other names to OpenAI's fields. Raises BadRequest for two names with different values."""
    _translate_options(body)
    if body.repeat_penalty is not None:
        _set(body, "repetition_penalty", body.repeat_penalty, "repeat_penalty")
        if body.repeat_last_n is None:
            body.repeat_last_n = LAST_TOKENS
    if body.n_predict is not None:
        _set_max_tokens(body, body.n_predict, "n_predict")
    if body.n_probs:
        _set_logprobs(body, body.n_probs)
    if isinstance(body, ChatCompletionRequest) and isinstance(body.think, str):
        _set(body, "reasoning_effort", body.think, "think")
    if body.cache_prompt is False and body.cache_salt is None:
        body.cache_salt = secrets.token_hex(16)  # no other request finds its blocks, and it finds none


def structure_with_format(body: GenerationFields) -> Structure | None:
    """Return the constraint on the output in OpenAI's and vLLM's fields, or in Ollama's `format`. Raises BadRequest for
    both.
    """
    structure = structure_of(body)
    if not body.format:
        return structure
    if structure is not None:
        raise BadRequest(f"format and {structure.param} both constrain the output: give one of them.", param="format")
    if body.format == "json":
        return Structure(kind="json_object", param="format")
    return Structure(kind="json_schema", value=body.format, param="format")


def _translate_options(body: GenerationFields) -> None:
    """Apply Ollama's `options` to fields that the body does not set."""
    if (options := body.options) is None:
        return
    for name in (*SamplingFields.__struct_fields__, "stop"):
        if getattr(body, name) is None:
            setattr(body, name, getattr(options, name))
    penalized = any((options.repetition_penalty, options.frequency_penalty, options.presence_penalty))
    if penalized and body.repeat_last_n is None:
        body.repeat_last_n = LAST_TOKENS
    open_ = body.max_tokens is None and getattr(body, "max_completion_tokens", None) is None
    if options.num_predict is not None and open_:
        _set_max_tokens(body, options.num_predict, "options.num_predict")


def _set_max_tokens(body: GenerationFields, value: int, param: str) -> None:
    if value == 0 and param == "n_predict":
        raise BadRequest("n_predict must be at least 1, or -1.", param=param)
    if value <= 0:
        return  # `is_unlimited`
    if getattr(body, "max_completion_tokens", None) not in (None, value):
        raise BadRequest(f"{param} and max_completion_tokens differ: give one of them.", param=param)
    _set(body, "max_tokens", value, param)


def max_tokens_param(body: GenerationFields, name: str) -> str:
    """Return the field that sets max_tokens, `name` if OpenAI's own does."""
    if body.n_predict is not None and body.n_predict > 0:
        return "n_predict"
    given = body.options.num_predict if body.options is not None else None
    return "options.num_predict" if given is not None and given > 0 and given == body.max_tokens else name


def is_unlimited(body: GenerationFields) -> bool:
    """Return whether the output may fill the context: n_predict, or Ollama's num_predict, is not above 0, and no other
    name sets a limit.
    """
    limits = (body.n_predict, body.options and body.options.num_predict)
    return body.max_tokens is None and any(limit is not None and limit <= 0 for limit in limits)


def _set_logprobs(body: GenerationFields, number: int) -> None:
    if isinstance(body, ChatCompletionRequest):
        body.logprobs = True
        _set(body, "top_logprobs", number, "n_probs")
    else:
        _set(body, "logprobs", number, "n_probs")


def _set(body: msgspec.Struct, name: str, value: Json, param: str) -> None:
    if getattr(body, name) not in (None, value):
        raise BadRequest(f"{param} and {name} differ: give one of them.", param=param)
    setattr(body, name, value)
