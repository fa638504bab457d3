"""`GenerationSpec` -> `SamplingParams`: defaults, checks that need the model, and the fit into the context.

A parameter comes from the request, else from the model's generation_config.json (or what a GGUF file has in its place),
else it is the default of the dialect, of llama.cpp for GGUF files, or of OpenAI.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.checkpoints.honoured import report_ignored
from quire.checkpoints.reading import read_object
from quire.checkpoints.rules import Kind, Number, Rule, Whole, printable
from quire.configs.config import Config
from quire.configs.generation import PARAMETERS, read_generation
from quire.engine.messages import SamplingParams
from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.model_info import ModelInfo, Preset
from quire.server.request.fields import NEUTRAL
from quire.server.request.ngrams import chosen_ngram
from quire.server.request.preset import read_preset
from quire.server.request.request import GenerationOptions, GenerationSpec
from quire.server.request.samplers import Breaking, chain_of

LLAMACPP_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# the keys of generation_config.json that set defaults
_RULES: dict[str, Rule] = {
    "temperature": Number(0, 100),
    "top_p": Number(0, 1),
    "top_k": Whole(-1, (1 << 31) - 1),
    "min_p": Number(0, 1),
    "repetition_penalty": Number(1e-3, 100),
    "max_new_tokens": Whole(0, (1 << 63) - 1),
    "suppress_tokens": Kind("a list of token ids", (list,), (int,)),
}
MAX_BAD_WORD_TOKENS = 8192
GREEDY_BELOW = 1e-5  # lower temperatures count as 0


class BatchEncoder(Breaking, Protocol):
    """The part of `Tokenizer` that `to_sampling_params` needs."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...


class SamplingDefaults(NamedTuple):
    """`declared` by the model's files, by PARAMETER of its name (`preset`) or by --override-generation-config, which
    sets the `overridden` ones; `others`, of `source`, for what they leave open.
    """

    declared: dict[str, Any]
    others: dict[str, Any]
    source: str
    overridden: frozenset[str] = frozenset()
    preset: Preset = Preset()

    def describe(self) -> str:
        """Return one line for people."""
        rest = {name: value for name, value in self.others.items() if name not in self.declared}
        by_name = self.preset.sampling.keys() - self.overridden
        files = [
            f"{name} {value}"
            for name, value in self.declared.items()
            if name not in self.overridden and name not in by_name
        ]
        parameters = self.preset.options | {name: self.declared[name] for name in by_name}
        named = ", ".join(f"{name} {value}" for name, value in sorted(parameters.items()))
        flags = [f"{name} {value}" for name, value in self.declared.items() if name in self.overridden]
        set_ = ", ".join(flags) + " (--override-generation-config)" if flags else ""
        own = ", ".join(files) + " (the model's)" if files else ""
        open_ = f"{', '.join(f'{name} {value}' for name, value in rest.items())} ({self.source})" if rest else ""
        named = f"{named} (PARAMETER)" if named else ""
        return "; ".join(filter(None, (set_, named, own, open_))) or "OpenAI's"


def read_sampling_defaults(config: Config, model_folder: str) -> SamplingDefaults:
    """Return the content of generation_config.json, as --generation-config says, and llama.cpp's defaults for a GGUF
    file, under what the PARAMETERs of the model's name set, and then --override-generation-config.

    Raises ValueError when the file asked for is missing, or not JSON, or a value is out of range.
    """
    flag = "--override-generation-config"
    overrides = _checked(read_generation(config.server.override_generation_config or "{}"), flag)
    found, preset = _sampling_defaults(config, model_folder), read_preset(config.model.model)
    declared = found.declared | preset.sampling | overrides
    return found._replace(declared=declared, overridden=frozenset(overrides), preset=preset)


def _sampling_defaults(config: Config, model_folder: str) -> SamplingDefaults:
    """Return the defaults without --override-generation-config."""
    if config.server.generation_config == "vllm":
        return SamplingDefaults({}, {}, "OpenAI's")
    settings = read_object(Path(model_folder, "config.json")).get("quantization_config")
    is_gguf = isinstance(settings, dict) and settings.get("quant_method") == "gguf"
    others, source = (LLAMACPP_DEFAULTS, "llama.cpp's") if is_gguf else ({}, "OpenAI's")
    return SamplingDefaults(_declared_defaults(config.server.generation_config, model_folder), dict(others), source)


def _declared_defaults(source: str, model_folder: str) -> dict[str, Any]:
    path = os.path.join(model_folder if source == "auto" else source, "generation_config.json")
    if source == "auto" and not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"generation_config: cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"generation_config: {path} must be a JSON object")
    report_ignored(values, Path(path))
    return _checked(values, f"generation_config: {path}")


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the parameters among `values`, by our names. Raises ValueError for one that is out of range."""
    defaults = {}
    for key, name in PARAMETERS.items():
        if (value := values.get(key)) is None:
            continue
        if not (rule := _RULES[key]).fits(value):
            raise ValueError(f"{where}: {key} must be {rule}, not {printable(value)}")
        defaults[name] = value
    return defaults


def to_sampling_params(spec: GenerationSpec, model: ModelInfo, tokenizer: BatchEncoder) -> SamplingParams:
    """Return all parameters, not yet fitted into the context (`fit`). Raises BadRequest naming the parameter and the
    limit.

    With max_tokens 0, for an echo, the engine runs the prompt and samples nothing.
    """
    options = spec.options
    picked = _picked(options, model, spec.dialect_defaults)
    if is_greedy(picked["temperature"]):
        picked["temperature"] = 0.0
    picked["top_k"] = max(picked["top_k"], 0)
    chain = chain_of(options, tokenizer, model.vocab_size)
    max_tokens = _max_tokens(spec, model)
    min_tokens = options.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens}).", param="min_tokens")
    return SamplingParams(
        max_tokens=model.max_model_len if max_tokens is None else max_tokens,
        min_tokens=min_tokens,
        **picked,
        chain=chain,
        seed=random.getrandbits(63) if options.seed in (None, -1) else options.seed,
        logit_bias=_logit_bias(options, model),
        allowed_token_ids=_distinct_ids(options.allowed_token_ids, "allowed_token_ids", model),
        no_repeat_ngram=chosen_ngram(
            options.no_repeat_ngram,
            options.no_repeat_ngram_size,
            options.no_repeat_ngram_window_size,
            model.max_model_len,
            model.vocab_size,
        ),
        bad_words_ids=_bad_words_ids(options, tokenizer, model),
        stop_token_ids=_distinct_ids(options.stop_token_ids, "stop_token_ids", model) or [],
        eos_token_ids=model.eos_token_ids,
        ignore_eos=bool(options.ignore_eos),
        # mirostat's state follows the tokens one by one
        speculation=options.speculation is not False and not (chain and chain.mirostat),
        logprobs=_logprobs(spec, model),
        prompt_logprobs=_prompt_logprobs(spec, model),
    )


def is_greedy(temperature: float | None) -> bool:
    """Return whether every token is the most likely one; False for None, which leaves it to the defaults."""
    return temperature is not None and temperature < GREEDY_BELOW


def fit(sampling: SamplingParams, num_prompt_tokens: int, model: ModelInfo, param: str) -> SamplingParams:
    """Clip max_tokens to the room that the context has after the prompt.

    Raises ContextLengthExceeded for the field `param` if there is none.
    """
    remaining = model.max_model_len - num_prompt_tokens
    if remaining < min(sampling.max_tokens, 1):
        raise too_long(num_prompt_tokens, model, param)
    if sampling.max_tokens <= remaining:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=remaining, min_tokens=min(sampling.min_tokens, remaining))


def check_max_tokens(spec: GenerationSpec, num_prompt_tokens: int, model: ModelInfo) -> None:
    """Raise BadRequest if max_tokens exceeds the context length, unless the dialect clips it.

    (A value that only exceeds the room after this prompt is clipped by `fit`, as vLLM and OpenAI do.)
    """
    param, max_tokens = spec.max_tokens_param, spec.options.max_tokens
    if max_tokens is not None and max_tokens > model.max_model_len and not spec.clip_max_tokens:
        raise BadRequest(
            f"{param} is too large: {max_tokens}. This model's context holds {model.max_model_len} tokens, prompt "
            f"included; the prompt has {num_prompt_tokens}, so that "
            f"{model.max_model_len - num_prompt_tokens} fit now. Without {param} the output may take what is left.",
            param=param,
        )


def too_long(num_prompt_tokens: int, model: ModelInfo, param: str, at_least: bool = False) -> ContextLengthExceeded:
    if model.pooling is not None and not model.pooling.generates and model.pooling.max_tokens == model.max_model_len:
        return too_long_text(num_prompt_tokens, model.max_model_len, param, at_least)
    return ContextLengthExceeded(
        f"This model's maximum context length is {model.max_model_len} tokens. However, your {param} resulted in "
        f"{_amount(num_prompt_tokens, at_least)} tokens"
        f"{'' if num_prompt_tokens > model.max_model_len else ', which leaves no room for output'}.",
        num_prompt_tokens,
        model.max_model_len,
        param=param,
    )


def _amount(num_tokens: int, at_least: bool) -> str:
    return f"at least {num_tokens}" if at_least else str(num_tokens)


def too_long_text(num_tokens: int, limit: int, param: str, at_least: bool = False) -> ContextLengthExceeded:
    """Return the error for a text beyond the limit that the model's files set."""
    return ContextLengthExceeded(
        f"This model reads at most {limit} tokens (max_seq_length in its files). However, your {param} resulted in "
        f"{_amount(num_tokens, at_least)} tokens.",
        num_tokens,
        limit,
        param=param,
    )


def _picked(options: GenerationOptions, model: ModelInfo, dialect: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters of `NEUTRAL`: the request's, else the model's, else the dialect's or, if it has none, those
    of the file's format, else the neutral values.
    """
    defaults = NEUTRAL | (model.other_defaults if dialect is None else dialect) | model.sampling_defaults
    given = {name: getattr(options, name) for name in NEUTRAL}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _max_tokens(spec: GenerationSpec, model: ModelInfo) -> int | None:
    """Return the maximum number of tokens; None: as many as the context holds."""
    for value in (spec.options.max_tokens, model.sampling_defaults.get("max_tokens")):
        if value is not None:
            return value
    return spec.default_max_tokens


def _distinct_ids(ids: list[int] | None, param: str, model: ModelInfo) -> list[int] | None:
    """Return each once, in order. Raises BadRequest for one that the model does not have."""
    if not ids:
        return ids
    if (highest := max(ids)) >= model.vocab_size:
        raise BadRequest(
            f"{param}: token id {highest} is not in the vocabulary, which has {model.vocab_size} entries.", param=param
        )
    return list(dict.fromkeys(ids))


def _logit_bias(options: GenerationOptions, model: ModelInfo) -> dict[int, float] | None:
    if not options.logit_bias:
        return None
    bias = {token_id: max(-100.0, min(100.0, value)) for token_id, value in options.logit_bias.items()}
    if min(bias) < 0:
        raise BadRequest(f"logit_bias: token id {min(bias)} is negative.", param="logit_bias")
    _distinct_ids(list(bias), "logit_bias", model)
    return bias


def _bad_words_ids(options: GenerationOptions, tokenizer: BatchEncoder, model: ModelInfo) -> list[list[int]] | None:
    """Return each word as it is tokenized at the start of a text and after a space."""
    texts = [text for word in options.bad_words or () for text in (word, " " + word.lstrip())]
    suppressed = [i for i in model.sampling_defaults.get("suppress_tokens", ()) if 0 <= i < model.vocab_size]
    sequences = (
        dict.fromkeys(tuple(ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=False) if ids)
        if texts
        else {}
    )
    if (total := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            f"bad_words: {total} tokens in all, each word counted with and without a space before it, are more "
            f"than {MAX_BAD_WORD_TOKENS}.",
            param="bad_words",
        )
    _distinct_ids([token_id for ids in sequences for token_id in ids], "bad_words", model)
    return [*map(list, sequences), *([token_id] for token_id in suppressed)] or None


def _logprobs(spec: GenerationSpec, model: ModelInfo) -> int | None:
    _check_logprobs(spec.options.logprobs, spec.logprobs_param, model)
    return spec.options.logprobs


def _prompt_logprobs(spec: GenerationSpec, model: ModelInfo) -> int | None:
    """Return the number that `prompt_logprobs` asks for, or the echo, which shows `logprobs` of the prompt, too."""
    requested = spec.options.prompt_logprobs
    _check_logprobs(requested, "prompt_logprobs", model)
    echoed = spec.options.logprobs if spec.echo else None
    if requested is None or echoed is None:
        return echoed if requested is None else requested
    return -1 if -1 in (requested, echoed) else max(requested, echoed)


def _check_logprobs(value: int | None, param: str, model: ModelInfo) -> None:
    if value is None or model.max_logprobs == -1:
        return
    if value == -1 or value > model.max_logprobs:
        requested = "the whole vocabulary (-1)" if value == -1 else str(value)
        raise BadRequest(f"{param}: {requested} is more than this server's limit of {model.max_logprobs}.", param=param)
