"""`prepare`: one `GenerationSpec` -> one `GenerationRequest` per prompt, in five steps of one direction: check every
parameter against the model, render the prompts, tokenize them, decide how the answers are read, and fit each prompt and
max_tokens into the context.

A large request is prepared in a thread: nothing here waits, or writes to shared state.
"""

from __future__ import annotations

import itertools
import time

import msgspec

from quire.engine.messages import SamplingParams
from quire.server.errors import BadRequest
from quire.server.generate import needs
from quire.server.model_info import ModelInfo
from quire.server.prompt.drafts import rendered
from quire.server.prompt.encode import Prompt, encode_texts, encoded
from quire.server.prompt.reading import Reading, reading_of
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.preset import filled
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec
from quire.server.request.sampling import check_max_tokens, fit, to_sampling_params
from quire.server.text.detokenizer import StopStrings

_serial = itertools.count()


def prepare(spec: GenerationSpec, state: needs.Prompting) -> list[GenerationRequest]:
    """Return the requests for the engine, one per prompt. The model must be ready (`state.require_ready`).

    Raises BadRequest naming the parameter and its limit.
    """
    sampling = checked(spec, state)
    drafts = rendered(spec, state)
    prompts = encoded(drafts, spec, state)
    reading = reading_of(spec, drafts, state.formats)
    sampling = msgspec.structs.replace(
        sampling,
        thinking=reading.thinking,
        stop_token_ids=[*dict.fromkeys((*sampling.stop_token_ids, *reading.end_ids))],
    )
    return [fitted(spec, sampling, prompt, reading, state.model) for prompt in prompts]


# ---- without the prompt


def checked(spec: GenerationSpec, state: needs.Encoding) -> SamplingParams:
    """Return the sampling parameters, with the presets of the model's name in `spec.options`. Raises BadRequest for all
    that can be refused without the prompt's tokens.
    """
    check_generates(state.model)
    check_options(spec)
    spec.options = filled(spec.options, state.model.preset)
    sampling = to_sampling_params(spec, state.model, state.tokenizer)
    return msgspec.structs.replace(sampling, prediction=_prediction_ids(spec.options.prediction, state))


def check_generates(model: ModelInfo) -> None:
    """Raise BadRequest for a model that only makes vectors."""
    if (pooling := model.pooling) is not None and not pooling.generates:
        raise BadRequest(f"The model generates no text; it serves: {', '.join(pooling.tasks)}.", param="model")
    if model.transcribes:
        raise BadRequest("The model transcribes audio; it serves: /v1/audio/transcriptions.", param="model")


def check_options(spec: GenerationSpec) -> None:
    """Raise BadRequest for a bad value that its type allows."""
    size = spec.options.truncate_prompt_tokens
    if size == 0:
        raise BadRequest("truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens")
    media = spec.prompts.media if isinstance(spec.prompts, Conversation) else spec.media
    if size is not None and media:
        raise BadRequest(
            f"truncate_prompt_tokens is not available for a prompt with {media[0].kind}s.",
            param="truncate_prompt_tokens",
        )


def check_priority(priority: int, model: ModelInfo) -> None:
    """Raise BadRequest for a priority that the scheduler would ignore."""
    if priority and not model.priorities:
        raise BadRequest(
            "priority needs a server with --scheduling-policy priority; this one serves in order of arrival.",
            param="priority",
        )


def _prediction_ids(text: str | None, state: needs.Encoding) -> list[int] | None:
    """Return the token ids of a predicted output, cut to the context length; None without one."""
    if text is None:
        return None
    text = text[: state.model.max_model_len * state.tokenizer.max_token_chars]
    (ids,) = encode_texts([text], state, False, "prediction", may_truncate=True)
    return ids[: state.model.max_model_len]


# ---- one prompt -> one request


def fitted(
    spec: GenerationSpec, sampling: SamplingParams, prompt: Prompt, reading: Reading, model: ModelInfo
) -> GenerationRequest:
    """Return the request for one prompt, truncated, with max_tokens fitted into the context. Raises BadRequest."""
    options = spec.options
    ids = truncate(prompt.ids, options, sampling, model)
    sampling = fit(sampling, len(ids), model, spec.prompt_param)
    check_max_tokens(spec, len(ids), model)
    if ids and max(ids) >= model.vocab_size:  # an added token for which the model has no embedding
        raise BadRequest(
            f"{spec.prompt_param}: token ids must be between 0 and {model.vocab_size - 1}, not {max(ids)}.",
            param=spec.prompt_param,
        )
    return GenerationRequest(
        request_id=f"{spec.request_id}-{next(_serial)}",  # clients may send one id twice
        prompt_token_ids=ids,
        prompt_text=prompt.text,
        sampling=sampling,
        n=options.n,
        stop=StopStrings([options.stop] if isinstance(options.stop, str) else options.stop or []),
        include_stop_str_in_output=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        spaces_between_special_tokens=options.spaces_between_special_tokens is not False,
        priority=spec.priority,
        # a client's salt contains no slash, so tenants cannot collide
        cache_salt=spec.cache_salt if spec.tenant is None else f"{spec.tenant}/{spec.cache_salt or ''}",
        cache_key=spec.cache_key,
        cache_seconds=spec.cache_seconds,
        turn_start=prompt.turn_start if len(ids) == len(prompt.ids) else 0,
        background=spec.background,
        adapters=spec.adapters,
        arrival_time=time.time(),
        structure=reading.structure,
        parsing=reading.parsing,
        visible_ids=reading.visible_ids,
        text_ends=reading.text_ends,
        media=prompt.media,
        transfer=spec.transfer,
    )


def truncate(ids: list[int], options: GenerationOptions, sampling: SamplingParams, model: ModelInfo) -> list[int]:
    """Return `ids` cut to `truncate_prompt_tokens`; -1 leaves room for max_tokens. Raises BadRequest."""
    size = options.truncate_prompt_tokens
    if size is None:
        return ids
    if size > model.max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens ({size}) is more than the context length of {model.max_model_len}.",
            param="truncate_prompt_tokens",
        )
    if size == -1:
        num_output = sampling.max_tokens if sampling.max_tokens < model.max_model_len else 1
        size = model.max_model_len - num_output
    return ids[:size] if options.truncation_side == "right" else ids[-size:]
