"""TGI's side of /generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.server.api import needs
from quire.server.api.textgen.protocol import Parameters, TextRequest
from quire.server.errors import ApiError, BadRequest
from quire.server.generate.deltas import Choice
from quire.server.http import sse
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.request import GenerationSpec, options_of
from quire.server.request.sampling import is_greedy
from quire.server.request.usage import TokenUsage
from quire.server.values import Json

DEFAULT_MAX_TOKENS = 100


def spec(body: TextRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background."""
    given = body.parameters or Parameters()
    if body.custom_logit_processor is not None:
        raise BadRequest("custom_logit_processor needs text or input_ids.", param="custom_logit_processor")
    greedy = given.do_sample is False or (given.do_sample is None and given.temperature is None)
    if given.best_of not in (None, 1) and not (greedy or is_greedy(given.temperature)):
        raise BadRequest(
            "parameters.best_of must be 1 unless do_sample is false: candidates are not ranked here.",
            param="parameters.best_of",
        )
    options = options_of(
        given,
        max_tokens=given.max_new_tokens,
        temperature=0.0 if greedy else given.temperature,
        truncate_prompt_tokens=given.truncate,
        speculation=body.speculation,
    )
    return GenerationSpec(
        prompts=[body.inputs],
        options=options,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_param="inputs",
        max_tokens_param="parameters.max_new_tokens",
        **identity,
    )


def error_event(error: ApiError) -> bytes:
    return sse.event(msgspec.json.encode({"error": error.message, "error_type": "generation"}))


class Answer:
    def __init__(self, body: TextRequest, state: needs.Text, one: GenerationRequest):
        self.parameters, self.state, self.one = body.parameters or Parameters(), state, one
        self.prefix = body.inputs if self.parameters.return_full_text else ""
        self.texts: list[str] = []
        self.used = TokenUsage.for_requests([one])

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        (choice,) = choices
        self.used.add(choice)
        out: dict[str, Any] = {"generated_text": self.prefix + choice.text}
        if self.parameters.details:
            tokens = [self._token(token_id) for token_id in choice.token_ids]
            out["details"] = self._details(choice.finish_reason, choice.stop_reason) | {
                "prefill": [],
                "tokens": tokens,
            }
        return out

    async def frames(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Yield bytes of whole events. Closing it aborts the generation."""
        try:
            async for delta in stream:
                self.texts.append(delta.text)
                self.used.add(delta)
                event: dict[str, Any] = {
                    "index": self.used.num_output,
                    "token": self._streamed(delta),
                    "generated_text": None,
                    "details": None,
                }
                if delta.finish_reason is not None:
                    event["generated_text"] = self.prefix + "".join(self.texts)
                    event["details"] = self._details(delta.finish_reason, delta.stop_reason)
                yield sse.event(msgspec.json.encode(event))
        finally:
            await stream.aclose()

    def _streamed(self, delta: Delta) -> dict[str, Any]:
        """Return the last token of a delta with all of its text; non-special tokens add up to the answer."""
        token = self._token(delta.token_ids[-1] if delta.token_ids else 0)
        return token if token["special"] and not delta.text else token | {"text": delta.text, "special": False}

    def _token(self, token_id: int) -> dict[str, Any]:
        tokenizer = self.state.tokenizer
        text, special = tokenizer.id_to_token(token_id), token_id in tokenizer.special_ids
        return {"id": token_id, "text": text, "logprob": None, "special": special}

    def _details(self, finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
        if finish_reason == "stop":
            finish_reason = "stop_sequence" if isinstance(stop_reason, str) else "eos_token"
        elif finish_reason == "timeout":
            finish_reason = "length"
        seed = self.one.sampling.seed if self.one.sampling.temperature else None
        return {"finish_reason": finish_reason, "generated_tokens": self.used.num_output, "seed": seed}
