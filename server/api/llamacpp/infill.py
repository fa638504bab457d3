"""llama.cpp's POST /infill."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.errors import BadRequest
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.http import admission, sse
from quire.server.http.read_body import use_body
from quire.server.http.route import EVENTS, Route
from quire.server.lora.fields import LoraScales
from quire.server.request.delta import Delta
from quire.server.request.fields import SamplingFields
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import RepetitionPenalty, Stop, Stops, Text
from quire.server.request.progress import PromptProgress, check_progress, report_progress
from quire.server.request.request import GenerationSpec, options_of
from quire.server.request.samplers import LAST_TOKENS
from quire.server.request.usage import TokenUsage
from quire.server.text.infill import infill_of
from quire.server.values import Json

ID_PREFIX = "infill-"
MAX_FILES = 256


class ExtraFile(msgspec.Struct, kw_only=True):
    text: Text
    filename: Annotated[str, Meta(max_length=4096)] = ""

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class InfillRequest(SamplingFields, kw_only=True):
    """POST /infill: the middle between `input_prefix` + `prompt` and `input_suffix`."""

    input_prefix: Text
    input_suffix: Text
    prompt: Text | None = None
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    repetition_penalty: RepetitionPenalty | None = msgspec.field(default=None, name="repeat_penalty")
    stop: Stop | Stops | None = None
    stream: bool | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    model: Annotated[str, Meta(max_length=256)] | None = None  # any name; that of an adapter chooses it
    lora: LoraScales | None = None
    speculation: bool | None = None  # false: no drafts (`docs/speculation.md`)
    return_progress: bool | None = None  # for the prompt, in events with `prompt_progress`

    harmless: ClassVar = frozenset({"cache_prompt", "id_slot", "n_indent", "t_max_prompt_ms"})
    unsupported: ClassVar[dict[str, tuple]] = {
        "prediction": (),
        "grammar": ("",),
        "json_schema": (),
        "n_probs": (0,),
    }


class InfillAnswer(msgspec.Struct, kw_only=True):
    content: str
    tokens: list[int]
    stop: bool
    stop_type: Literal["limit", "word", "eos"]
    stopping_word: str
    tokens_predicted: int
    tokens_evaluated: int  # for the prompt
    truncated: bool


async def infill(request: Request, state: needs.Completion) -> Response:
    """Return the text between two others."""
    body, one = await use_body(request, InfillRequest, state, lambda body: (body, _prepare(request, body, state)))
    predict = body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None
    progress = report_progress(body.return_progress, [one], _progress)
    stream = await admission.generate(request, state, [one], "input_prefix", predict)
    if body.stream:
        frames = sse.to_the_end(_frames(stream, one), one.request_id, done=b"")
        return sse.EventStream(frames, state.config.server.sse_keep_alive_interval, progress)
    (choice,) = await sse.unless_disconnected(request, deltas.collect(stream, 1))
    used = TokenUsage.for_requests([one])
    used.add(choice)
    end = _end(used, choice.finish_reason, choice.stop_reason)
    return sse.JsonResponse(end | {"content": choice.text, "tokens": choice.token_ids})


def _prepare(request: Request, body: InfillRequest, state: needs.Preparing) -> GenerationRequest:
    model = body.model if body.model in state.adapters.loaded else None
    identity = admission.admit(request, state, ID_PREFIX, model=model, lora=body.lora)
    if infill_of(state.tokenizer) is None:
        raise BadRequest("This model has no tokens for filling in the middle.", param="input_suffix")
    check_progress(body.return_progress, body.stream)
    return prepare(spec(body, **identity), state)[0]


def spec(body: InfillRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background, adapters."""
    limit = body.n_predict
    return GenerationSpec(
        prompts=[body.input_prefix + (body.prompt or "")],
        options=options_of(
            body,
            max_tokens=limit if limit is not None and limit >= 0 else None,
            repeat_last_n=LAST_TOKENS if body.repeat_last_n is None else body.repeat_last_n,
        ),
        suffix=body.input_suffix,
        clip_max_tokens=True,
        context=[(file.filename, file.text) for file in body.input_extra or ()],
        prompt_param="input_prefix",
        max_tokens_param="n_predict",
        **identity,
    )


async def _frames(stream: AsyncGenerator[Delta, None], one: GenerationRequest) -> AsyncGenerator[bytes, None]:
    used = TokenUsage.for_requests([one])
    try:
        async for delta in stream:
            used.add(delta)
            part: dict[str, Any] = {"content": delta.text, "tokens": delta.token_ids, "stop": False}
            if delta.finish_reason is not None:
                part |= _end(used, delta.finish_reason, delta.stop_reason)
            yield sse.event(msgspec.json.encode(part))
    finally:
        await stream.aclose()


def _progress(now: PromptProgress) -> bytes:
    return sse.event(msgspec.json.encode({"content": "", "tokens": [], "stop": False, "prompt_progress": now}))


def _end(used: TokenUsage, finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    word = stop_reason if isinstance(stop_reason, str) else ""
    return {
        "stop": True,
        "stop_type": "limit" if finish_reason in ("length", "timeout") else "word" if word else "eos",
        "stopping_word": word,
        "tokens_predicted": used.num_output,
        "tokens_evaluated": used.num_prompt,
        "truncated": False,
    }


ROUTES = [Route("POST", "/infill", infill, InfillRequest, InfillAnswer, stream=EVENTS)]
