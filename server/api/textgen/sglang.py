"""SGLang's side of /generate."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.server.api.textgen.protocol import SamplingParameters, TextRequest
from quire.server.errors import ApiError, BadRequest
from quire.server.generate.deltas import Choice
from quire.server.http import sse
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.ngrams import from_sglang
from quire.server.request.request import GenerationSpec, options_of
from quire.server.structured.structure import Structure
from quire.server.values import Json

DEFAULT_MAX_TOKENS = 128


def spec(body: TextRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background. Raises BadRequest."""
    given = body.sampling_params or SamplingParameters()
    options = options_of(
        given,
        n=given.n or 1,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        no_repeat_ngram=from_sglang(body.custom_logit_processor, given.custom_params),
        speculation=body.speculation,
    )
    return GenerationSpec(
        prompts=_prompts(body),
        options=options,
        structure=_structure(given),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_param="text" if body.text is not None else "input_ids",
        max_tokens_param="sampling_params.max_new_tokens",
        **identity,
    )


def _prompts(body: TextRequest) -> list[str] | list[list[int]]:
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else body.text
    kinds = {type(item) for item in body.input_ids}
    if len(kinds) > 1:
        raise BadRequest("input_ids must be a list of token ids or a list of such lists.", param="input_ids")
    return [body.input_ids] if kinds == {int} else body.input_ids


def _structure(given: SamplingParameters) -> Structure | None:
    kinds = {"regex": given.regex, "grammar": given.ebnf, "json_schema": given.json_schema}
    found = [(kind, value) for kind, value in kinds.items() if value is not None]
    if len(found) > 1:
        raise BadRequest("Give one of regex, ebnf and json_schema.", param="sampling_params")
    if not found:
        return None
    ((kind, value),) = found
    param = f"sampling_params.{'ebnf' if kind == 'grammar' else kind}"
    if kind == "json_schema":
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{param} is not valid JSON: {error}", param=param) from None
    return Structure(kind=kind, value=value, param=param)


def error_event(error: ApiError) -> bytes:
    return sse.event(msgspec.json.encode({"error": {"message": error.message}}))


class Answer:
    """The answer. `many`: it is a list, because the prompts were or there are several choices."""

    def __init__(self, body: TextRequest, requests: list[GenerationRequest]):
        self.requests, self.n = requests, requests[0].n
        self.many = self.n > 1 or isinstance(body.text, list) or isinstance((body.input_ids or [0])[0], list)
        self.started = time.perf_counter()
        self.choices = [Choice(i) for i in range(len(requests) * self.n)]

    def whole(self, choices: list[Choice]) -> Any:
        out = [self._output(i, choice) for i, choice in enumerate(choices)]
        return out if self.many else out[0]

    async def frames(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Yield bytes of whole events, each with the whole text so far. Closing it aborts the generation."""
        try:
            async for delta in stream:
                choice = self.choices[delta.index]
                choice.add(delta)
                event = self._output(delta.index, choice) | ({"index": delta.index} if self.many else {})
                yield sse.event(msgspec.json.encode(event))
        finally:
            await stream.aclose()

    def _output(self, index: int, choice: Choice) -> dict[str, Any]:
        one = self.requests[index // self.n]
        reason: dict[str, Any] | None = None
        if choice.finish_reason == "length":
            reason = {"type": "length", "length": len(choice.token_ids)}
        elif choice.finish_reason is not None:
            reason = {"type": choice.finish_reason, "matched": choice.stop_reason}
        return {
            "text": choice.text,
            "output_ids": choice.token_ids,
            "meta_info": {
                "id": one.request_id,
                "finish_reason": reason,
                "prompt_tokens": len(one.prompt_token_ids),
                "completion_tokens": len(choice.token_ids),
                "cached_tokens": choice.counts.cached,
                "e2e_latency": time.perf_counter() - self.started,
            },
        }
