"""POST /v1/completions: one or several prompts, as text or ids -> one body, or SSE chunks."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import TokenLogprobs
from quire.server.api import needs
from quire.server.api.openai.answer import Answer, admit, respond
from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.objects import Completion, CompletionChoice, CompletionLogprobs, Usage
from quire.server.api.openai.protocol import CompletionRequest
from quire.server.api.openai.translate import completion_spec
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest

ID_PREFIX = "cmpl-"


async def completions(request: Request, state: needs.Completion) -> Response:
    """Continue one or several texts, as a whole or as a stream of events. Raises ApiError for everything that goes
    wrong before the first byte of the answer.
    """
    body, requests = await use_body(
        request, CompletionRequest, state, lambda body: (body, _prepare(request, body, state))
    )
    answer = CompletionAnswer(body, state, ID_PREFIX + caller(request).request_id, requests)
    return await respond(request, state, answer, requests, "prompt")


def _prepare(request: Request, body: CompletionRequest, state: needs.Preparing) -> list[GenerationRequest]:
    identity = admit(request, body, state, ID_PREFIX)
    requests = prepare(completion_spec(body, **identity), state)
    body.prompt = ""  # freed here, in the thread: freeing takes long
    return requests


class CompletionAnswer(Answer):
    """A `Completion`, or its chunks."""

    chunk_type = Completion
    body: CompletionRequest

    def __init__(
        self,
        body: CompletionRequest,
        state: needs.Completion,
        answer_id: str,
        requests: list[GenerationRequest],
    ):
        super().__init__(body, state, answer_id, requests)
        self.texts = [one.prompt_text for one in requests]
        self.formatters: dict[int, Formatter] = {}  # per choice, which counts its own text offsets
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # for a stream, per choice, until they are sent

    def whole(self, choices: list[deltas.Choice]) -> Completion:
        out = []
        for i, choice in enumerate(choices):
            echo = self._echo(i, choice.prompt_logprobs)
            out.append(
                self._output(
                    i, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason, echo
                )
            )
            self.used.add(choice)
            if self.body.prompt_logprobs is not None:
                out[-1].prompt_logprobs = Formatter(self.state.tokenizer, self.body.prompt_logprobs).prompt(
                    choice.prompt_logprobs
                )
            if self.body.return_token_ids:
                out[-1].prompt_token_ids = self.prompts[i // self.n]
        return self.filled(Completion, out, self.timings(True), usage=Usage.from_usage(self.used))

    def size(self, choices: list[deltas.Choice]) -> int:
        return super().size(choices) + (sum(map(self._echo_size, range(len(choices)))) if self.body.echo else 0)

    def frame_size(self, delta: Delta) -> int:
        return self._echo_size(delta.index) if self.body.echo and delta.index not in self.started else 0

    def frame(self, delta: Delta) -> bytes:
        body = self.body
        if delta.prompt_logprobs:  # in parts, all before the first token
            self.prompt_logprobs.setdefault(delta.index, []).extend(delta.prompt_logprobs)
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        first = delta.index not in self.started
        self.started.add(delta.index)
        plain = body.logprobs is None and not body.return_token_ids and not self.running_usage
        if plain and delta.finish_reason is None and not (first and body.echo):
            return (
                b""
                if not delta.text
                else b'%b%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]%b'
                % (self.head, delta.index, sse.one_line(msgspec.json.encode(delta.text)), self.tail)
            )
        echo = self._echo(delta.index, self.prompt_logprobs.pop(delta.index, [])) if first else ("", None)
        choice = self._output(
            delta.index, delta.text, delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason, echo
        )
        if first and body.return_token_ids:
            choice.prompt_token_ids = self.prompts[delta.index // self.n]
        return self.event([choice])

    def _formatter(self, index: int) -> Formatter:
        if index not in self.formatters:
            self.formatters[index] = Formatter(
                self.state.tokenizer,
                self.body.logprobs or 0,
                as_ids=bool(self.body.return_tokens_as_token_ids),
                skip_special_tokens=self.body.skip_special_tokens is not False,
            )
        return self.formatters[index]

    def _echo_size(self, index: int) -> int:
        """Return the work of echoing the prompt, for `Threads.run`."""
        return len(self.prompts[index // self.n]) * (1 if self.body.logprobs is None else deltas.POSITION_SIZE)

    def _echo(self, index: int, prompt_logprobs: list[TokenLogprobs]) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt's text and log-probabilities, which precede the output; empty unless it is echoed."""
        if not self.body.echo:
            return "", None
        ids, text = self.prompts[index // self.n], self.texts[index // self.n]
        if text is None:
            text = self.state.tokenizer.decode_characters(ids, self.body.skip_special_tokens is not False)
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._formatter(index).completion(prompt_logprobs, ids[0])
        return text, logprobs

    def _output(
        self,
        index: int,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: str | None,
        stop_reason: int | str | None,
        echo: tuple[str, CompletionLogprobs | None] = ("", None),
    ) -> CompletionChoice:
        """Return a choice with these tokens, after the echo."""
        prompt_text, formatted = echo
        if self.body.logprobs is not None:
            new = self._formatter(index).completion(logprobs)
            formatted = _joined(formatted, new) if formatted else new
        return CompletionChoice(
            index,
            prompt_text + text,
            formatted,
            finish_reason,
            stop_reason,
            ids if self.body.return_token_ids else UNSET,
        )


def _joined(a: CompletionLogprobs, b: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        a.tokens + b.tokens,
        a.token_logprobs + b.token_logprobs,
        a.top_logprobs + b.top_logprobs,
        a.text_offset + b.text_offset,
    )
