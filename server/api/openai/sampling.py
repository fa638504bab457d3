"""A request's fields -> `SamplingParams`: defaults, checks that need the model, and the fit into the context.

A parameter is taken from the request, else from the model's generation_config.json, else it is OpenAI's default.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgspec

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.state import ModelInfo

OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
COMPLETION_MAX_TOKENS = 16
MAX_BAD_WORD_TOKENS = 8192
GREEDY_BELOW = 1e-5  # a temperature this small leaves nothing to chance


def read_sampling_defaults(config: Config, model_folder: str) -> dict[str, Any]:
    """Sampling parameters out of generation_config.json, as --generation-config says.

    Raises ValueError when the file asked for is missing or not JSON.
    """
    source = config.server.generation_config
    if source == "vllm":
        return {}
    path = os.path.join(model_folder if source == "auto" else source, "generation_config.json")
    if source == "auto" and not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"generation_config: cannot read {path}: {error}") from error
    defaults = {name: values[name] for name in OPENAI_DEFAULTS if values.get(name) is not None}
    if values.get("max_new_tokens") is not None:
        defaults["max_tokens"] = values["max_new_tokens"]
    return defaults


def to_sampling_params(
    request: ChatCompletionRequest | CompletionRequest, model: ModelInfo, tokenizer: Any
) -> SamplingParams:
    """Everything but the fit into the context (`fit`). Raises BadRequest naming the field and the limit.

    With max_tokens 0, for an echo, the engine runs the prompt and samples nothing.
    """
    pick = _Picker(request, model.sampling_defaults)
    temperature = pick("temperature")
    temperature = 0.0 if temperature < GREEDY_BELOW else temperature
    if temperature == 0.0 and (request.n or 1) > 1:
        raise BadRequest(
            "n must be 1 when using greedy sampling (temperature 0): all choices would be the same.", param="n"
        )
    max_tokens = _max_tokens(request, model)
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens}).", param="min_tokens")
    return SamplingParams(
        max_tokens=model.max_model_len if max_tokens is None else max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=pick("top_p"),
        top_k=max(pick("top_k"), 0),
        min_p=pick("min_p"),
        seed=random.getrandbits(63) if request.seed in (None, -1) else request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty"),
        logit_bias=_logit_bias(request, model),
        allowed_token_ids=_distinct_ids(request.allowed_token_ids, "allowed_token_ids", model),
        bad_words_ids=_bad_words_ids(request, tokenizer, model),
        stop_token_ids=_distinct_ids(request.stop_token_ids, "stop_token_ids", model) or [],
        eos_token_ids=model.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=_logprobs(request, model),
        prompt_logprobs=_prompt_logprobs(request, model),
    )


def fit(sampling: SamplingParams, num_prompt_tokens: int, model: ModelInfo, param: str) -> SamplingParams:
    """Clip max_tokens to what the context leaves behind the prompt.

    Raises ContextLengthExceeded (for the field `param`) when that is nothing.
    """
    remaining = model.max_model_len - num_prompt_tokens
    if remaining < min(sampling.max_tokens, 1):
        raise too_long(num_prompt_tokens, model, param)
    if sampling.max_tokens <= remaining:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=remaining, min_tokens=min(sampling.min_tokens, remaining))


def check_max_tokens(
    request: ChatCompletionRequest | CompletionRequest, num_prompt_tokens: int, model: ModelInfo
) -> None:
    """Raises BadRequest for more than the context could ever hold.

    (What is merely too much behind this prompt is clipped, as by vLLM and OpenAI.)
    """
    param = _max_tokens_param(request)
    wanted = getattr(request, param)
    if wanted is not None and wanted > model.max_model_len:
        raise BadRequest(
            f"{param} is too large: {wanted}. This model's context holds {model.max_model_len} tokens, prompt "
            f"included; the prompt has {num_prompt_tokens}, so that "
            f"{model.max_model_len - num_prompt_tokens} fit now. Without {param} the output may take what is left.",
            param=param,
        )


def _max_tokens_param(request: ChatCompletionRequest | CompletionRequest) -> str:
    return "max_completion_tokens" if getattr(request, "max_completion_tokens", None) is not None else "max_tokens"


def too_long(num_prompt_tokens: int, model: ModelInfo, param: str, at_least: bool = False) -> ContextLengthExceeded:
    amount = f"at least {num_prompt_tokens}" if at_least else str(num_prompt_tokens)
    return ContextLengthExceeded(
        f"This model's maximum context length is {model.max_model_len} tokens. However, your {param} resulted in "
        f"{amount} tokens"
        f"{'' if num_prompt_tokens > model.max_model_len else ', which leaves no room for output'}.",
        param=param,
    )


class _Picker:
    def __init__(self, request: msgspec.Struct, defaults: dict[str, Any]):
        self.request, self.defaults = request, defaults

    def __call__(self, name: str) -> Any:
        value = getattr(self.request, name)
        return self.defaults.get(name, OPENAI_DEFAULTS[name]) if value is None else value


def _max_tokens(request: ChatCompletionRequest | CompletionRequest, model: ModelInfo) -> int | None:
    """None is all the context holds."""
    default = model.sampling_defaults.get("max_tokens")
    param = _max_tokens_param(request)
    wanted = getattr(request, param)
    if isinstance(request, CompletionRequest):
        default = COMPLETION_MAX_TOKENS if default is None else default
        if wanted == 0 and not request.echo:
            raise BadRequest("max_tokens must be at least 1 unless echo is true.", param=param)
    else:
        if param == "max_completion_tokens" and request.max_tokens not in (None, wanted):
            raise BadRequest(
                "max_tokens is the old name of max_completion_tokens: give one, or both with the same value.",
                param="max_tokens",
            )
        if wanted == 0:
            raise BadRequest(f"{param} must be at least 1.", param=param)
    return default if wanted is None else wanted


def _distinct_ids(ids: list[int] | None, param: str, model: ModelInfo) -> list[int] | None:
    """Each once, in order. Raises BadRequest for one that the model does not have."""
    if not ids:
        return ids
    if (highest := max(ids)) >= model.vocab_size:
        raise BadRequest(
            f"{param}: token id {highest} is not in the vocabulary, which has {model.vocab_size} entries.", param=param
        )
    return list(dict.fromkeys(ids))


def _logit_bias(request: ChatCompletionRequest | CompletionRequest, model: ModelInfo) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    try:
        bias = {int(key): max(-100.0, min(100.0, value)) for key, value in request.logit_bias.items()}
    except ValueError:
        raise BadRequest("logit_bias: keys must be token ids.", param="logit_bias") from None
    if min(bias) < 0:
        raise BadRequest(f"logit_bias: token id {min(bias)} is negative.", param="logit_bias")
    _distinct_ids(list(bias), "logit_bias", model)
    return bias


def _bad_words_ids(
    request: ChatCompletionRequest | CompletionRequest, tokenizer: Any, model: ModelInfo
) -> list[list[int]] | None:
    """Each word as it is tokenized at the start of a text and after a space."""
    texts = [text for word in request.bad_words or () for text in (word, " " + word.lstrip())]
    sequences = (
        dict.fromkeys(tuple(ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=False) if ids)
        if texts
        else {}
    )
    if (total := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            (
                f"bad_words: {total} tokens in all, each word counted with and without a space before it, are more "
                f"than {MAX_BAD_WORD_TOKENS}."
            ),
            param="bad_words",
        )
    _distinct_ids([token_id for ids in sequences for token_id in ids], "bad_words", model)
    return [list(ids) for ids in sequences] or None


def _logprobs(request: ChatCompletionRequest | CompletionRequest, model: ModelInfo) -> int | None:
    if isinstance(request, CompletionRequest):
        _check_logprobs(request.logprobs, "logprobs", model)
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        if request.top_logprobs == 0:
            return None
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    _check_logprobs(request.top_logprobs, "top_logprobs", model)
    return (request.top_logprobs or 0) if request.logprobs else None


def _prompt_logprobs(request: ChatCompletionRequest | CompletionRequest, model: ModelInfo) -> int | None:
    _check_logprobs(request.prompt_logprobs, "prompt_logprobs", model)
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs are not available with stream.", param="prompt_logprobs")
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    if request.prompt_logprobs is None or echoed is None:
        return echoed if request.prompt_logprobs is None else request.prompt_logprobs
    return -1 if -1 in (request.prompt_logprobs, echoed) else max(request.prompt_logprobs, echoed)


def _check_logprobs(value: int | None, param: str, model: ModelInfo) -> None:
    if value is None or model.max_logprobs == -1:
        return
    if value == -1 or value > model.max_logprobs:
        asked = "the whole vocabulary (-1)" if value == -1 else str(value)
        raise BadRequest(f"{param}: {asked} is more than this server's limit of {model.max_logprobs}.", param=param)
