"""`prepare`: one `GenerationSpec` -> one `GenerationRequest` per prompt. Renders the chat template, tokenizes,
truncates, checks every parameter against the model, and fits max_tokens into the context.

A large request is prepared in a thread: nothing here waits, or writes to shared state.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec

from quire.engine.messages import SamplingParams
from quire.server import needs
from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.generate.conversation import Reading, Rendered, read_answer, render_conversation
from quire.server.generate.generation_request import Attached, GenerationRequest
from quire.server.generate.images import Illustrated
from quire.server.generate.infill import ending_with, infill_prompts
from quire.server.generate.limits import MAX_CHOICES, MAX_PROMPTS
from quire.server.generate.request import Conversation, GenerationOptions, GenerationSpec
from quire.server.generate.sampling import check_max_tokens, fit, to_sampling_params, too_long
from quire.server.model_info import ModelInfo
from quire.server.text.detokenizer import StopStrings

_serial = itertools.count()


def prepare(spec: GenerationSpec, state: needs.Prompting) -> list[GenerationRequest]:
    """The requests for the engine, one per prompt. The model must be ready (`state.require_ready`).

    Raises BadRequest naming the parameter and its limit.
    """
    if (pooling := state.model.pooling) is not None and not pooling.generates:
        raise BadRequest(f"The model generates no text; it serves: {', '.join(pooling.tasks)}.", param="model")
    check_options(spec.options)
    sampling = to_sampling_params(spec, state.model, state.tokenizer)
    if spec.options.prediction is not None:
        sampling = msgspec.structs.replace(sampling, prediction=_prediction_ids(spec.options.prediction, state))
    reading = Reading(structure=spec.structure)
    illustrated = None
    if isinstance(spec.prompts, Conversation):
        rendered = render_conversation(spec.prompts, state)
        illustrated = rendered.illustrated
        may_truncate = spec.options.truncate_prompt_tokens is not None
        prompts = encode_texts(
            [rendered.text], state, bool(spec.add_special_tokens), "messages", may_truncate=may_truncate
        )
        reading = read_answer(spec.prompts, rendered, spec.structure, state)
        sampling = msgspec.structs.replace(sampling, thinking=reading.thinking)
    elif spec.suffix is not None:
        prompts, infill = infill_prompts(spec, state)
        sampling = msgspec.structs.replace(sampling, stop_token_ids=ending_with(sampling, infill))
    elif spec.images:
        (text,) = spec.prompts
        illustrated = Illustrated.join(text.split(state.images.placeholder), spec.images, state, spec.prompt_param)
        prompts = encode_texts([illustrated.text], state, spec.add_special_tokens is not False, spec.prompt_param)
    else:
        prompts = prompt_ids(spec, state)
    texts = _kept_texts(spec)
    requests = []
    for ids, text in zip(prompts, texts, strict=True):
        media = []
        if illustrated is not None:
            ids, media = _expand(illustrated, ids, spec, state)
        requests.append(_request(spec, sampling, ids, text, reading, state))
        requests[-1].media = media
    return requests


def check_options(options: GenerationOptions) -> None:
    """Raises BadRequest for a value that its type cannot exclude."""
    if options.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens")


def check_priority(priority: int, model: ModelInfo) -> None:
    """Raises BadRequest for a priority that the scheduler would ignore."""
    if priority and not model.priorities:
        raise BadRequest(
            "priority needs a server with --scheduling-policy priority; this one serves in order of arrival.",
            param="priority",
        )


# ---- prompts -> token ids


def prompt_ids(spec: GenerationSpec, state: needs.Encoding) -> list[list[int]]:
    """Token ids of each prompt, not yet truncated. Raises BadRequest for `spec.prompt_param`."""
    prompts, may_truncate = spec.prompts, spec.options.truncate_prompt_tokens is not None
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt: {len(prompts)} prompts are more than {MAX_PROMPTS}.", param="prompt")
    if len(prompts) * spec.options.n > MAX_CHOICES:
        raise BadRequest(f"prompt: {len(prompts)} prompts times n are more than {MAX_CHOICES} choices.", param="prompt")
    if isinstance(prompts[0], str):
        prompts = encode_texts(
            prompts, state, spec.add_special_tokens is not False, spec.prompt_param, may_truncate=may_truncate
        )
    if not all(prompts):
        raise BadRequest("prompt must not be empty.", param="prompt")
    return prompts


def encode_conversation(conversation: Conversation, state: needs.Prompting, add_special_tokens: bool) -> list[int]:
    """Token ids of the rendered template, of any number. Raises BadRequest naming the option at fault."""
    return encode_rendered(render_conversation(conversation, state), state, add_special_tokens)


def encode_rendered(rendered: Rendered, state: needs.Encoding, add_special_tokens: bool) -> list[int]:
    """Token ids of a rendered template, of any number. Raises BadRequest."""
    (ids,) = encode_texts([rendered.text], state, add_special_tokens, "messages", may_truncate=True)
    return ids if rendered.illustrated is None else rendered.illustrated.expand(ids, "messages")[0]


def encode_texts(
    texts: Sequence[str], state: needs.Encoding, add_special_tokens: bool, param: str, *, may_truncate: bool = False
) -> list[list[int]]:
    """Token ids of each text.

    A text too long for the context under any tokenization is refused before tokenizing, unless it may be truncated.
    """
    longest = state.tokenizer.max_token_chars
    for text in texts:
        if not may_truncate and len(text) > state.model.max_model_len * longest:
            raise too_long(len(text) // longest, state.model, param, at_least=True)
    try:
        return state.tokenizer.encode_batch(texts, add_special_tokens)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}.", param=param) from error


def _prediction_ids(text: str, state: needs.Encoding) -> list[int]:
    """Token ids of a predicted output, as many as the context holds."""
    text = text[: state.model.max_model_len * state.tokenizer.max_token_chars]
    (ids,) = encode_texts([text], state, False, "prediction", may_truncate=True)
    return ids[: state.model.max_model_len]


def _kept_texts(spec: GenerationSpec) -> list[str | None]:
    """The prompts given as text and used whole; None for the others."""
    prompts = spec.prompts
    if isinstance(prompts, Conversation):
        return [None]
    kept = isinstance(prompts[0], str) and spec.options.truncate_prompt_tokens is None
    return prompts if kept else [None] * len(prompts)


# ---- one prompt -> one request


def _expand(
    illustrated: Illustrated, ids: list[int], spec: GenerationSpec, state: needs.Model
) -> tuple[list[int], list[Attached]]:
    """The ids with those of the images, and where each of these is. Raises BadRequest."""
    if spec.options.truncate_prompt_tokens is not None:
        raise BadRequest(
            "truncate_prompt_tokens is not available for a prompt with images.", param="truncate_prompt_tokens"
        )
    model, num_tokens = state.model, illustrated.num_tokens
    total = len(ids) + num_tokens - sum(owner is not None for owner in illustrated.owners)
    if total >= model.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your {spec.prompt_param} "
            f"resulted in {total} tokens, of which {len(illustrated.images)} images take {num_tokens}.",
            param=spec.prompt_param,
        )
    ids, items = illustrated.expand(ids, spec.prompt_param)
    return ids, [Attached(item, one) for item, one in zip(items, illustrated.leases, strict=True)]


def _request(
    spec: GenerationSpec,
    sampling: SamplingParams,
    ids: list[int],
    text: str | None,
    reading: Reading,
    state: needs.Model,
) -> GenerationRequest:
    options, model = spec.options, state.model
    ids = truncate(ids, options, sampling, model)
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
        prompt_text=text,
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
        background=spec.background,
        adapters=spec.adapters,
        arrival_time=time.time(),
        structure=reading.structure,
        parsing=reading.parsing,
        visible_ids=reading.visible_ids,
    )


def truncate(ids: list[int], options: GenerationOptions, sampling: SamplingParams, model: ModelInfo) -> list[int]:
    """`ids` cut to `truncate_prompt_tokens`; -1 cuts to what leaves room for max_tokens. Raises BadRequest."""
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
