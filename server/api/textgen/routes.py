"""POST /generate and /generate_stream: text in, text out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.textgen import sglang, tgi
from quire.server.api.textgen.protocol import GeneratedText, TextOutput, TextRequest
from quire.server.errors import BadRequest
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.http import admission, sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.route import EVENTS, Route
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import check_progress, report_progress

ID_PREFIX = "gen-"


async def generate(request: Request, state: needs.Completion) -> Response:
    """Continue a text, in the form that the request has."""
    return await _generate(request, state, False)


async def generate_stream(request: Request, state: needs.Completion) -> Response:
    """Continue a text as a stream of events."""
    return await _generate(request, state, True)


async def _generate(request: Request, state: needs.Completion, stream: bool) -> Response:
    def work(body: TextRequest) -> tuple[TextRequest, list[GenerationRequest]]:
        check_progress(body.return_progress, stream or body.stream)
        return body, _prepare(request, body, state)

    body, requests = await use_body(request, TextRequest, state, work)
    progress = report_progress(body.return_progress, requests)
    of_tgi = body.inputs is not None
    generation = await admission.generate(request, state, requests, "inputs" if of_tgi else "text")
    answer = tgi.Answer(body, state, requests[0]) if of_tgi else sglang.Answer(body, requests)
    if stream or body.stream:
        error_event, done = (tgi.error_event, b"") if of_tgi else (sglang.error_event, sse.DONE)
        frames = sse.to_the_end(answer.frames(generation), requests[0].request_id, error_event, done)
        return sse.EventStream(frames, state.config.server.sse_keep_alive_interval, progress)
    num_choices = sum(one.n for one in requests)
    choices = await sse.unless_disconnected(request, deltas.collect(generation, num_choices))
    return await state.threads.run(
        deltas.answer_size(choices), lambda: sse.JsonResponse(answer.whole(choices)), caller(request).turn
    )


def _prepare(request: Request, body: TextRequest, state: needs.Preparing) -> list[GenerationRequest]:
    if sum(field is not None for field in (body.inputs, body.text, body.input_ids)) != 1:
        raise BadRequest("Give exactly one of inputs (as for TGI), text and input_ids (as for SGLang).", param="inputs")
    model = body.lora_path if body.inputs is None else body.parameters and body.parameters.adapter_id
    identity = admission.admit(request, state, ID_PREFIX, model=model, priority=body.priority, request_id=body.rid)
    spec = tgi.spec if body.inputs is not None else sglang.spec
    return prepare(spec(body, **identity), state)


ROUTES = [
    Route("POST", "/generate", generate, TextRequest, (GeneratedText, TextOutput, list[TextOutput]), stream=EVENTS),
    Route("POST", "/generate_stream", generate_stream, TextRequest, EVENTS),
]
