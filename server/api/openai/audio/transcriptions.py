"""/v1/audio/transcriptions and /v1/audio/translations: a file -> its text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.engine.messages import SamplingParams
from quire.server.api import needs
from quire.server.api.openai.audio import objects, subtitles
from quire.server.api.openai.audio.fields import TIMED, Fields, check_model, read_fields
from quire.server.api.openai.audio.json_form import MAX_BYTES, form_of
from quire.server.errors import BadRequest, GatewayTimeout, UnsupportedMediaType
from quire.server.generate.deadlines import within
from quire.server.generate.prompted_transcription import transcription_of
from quire.server.generate.transcription import Said, Segment, Transcription, TranscriptionSpec, most_before
from quire.server.http import admission, request_options, sse
from quire.server.http.bodies.form import MAX_FORM_BYTES, declared_size, read_form
from quire.server.http.caller import caller
from quire.server.http.read_body import in_turns, read_body
from quire.server.media.audio.languages import NAMES, gap
from quire.server.media.audio.service import Pieces, Room, too_large
from quire.server.request.generation_request import GenerationRequest

ID_PREFIX = "transcribe-"


async def transcriptions(request: Request, state: needs.Transcriptions) -> Response:
    """Return the text of an audio file, in its own language. Raises ApiError."""
    return await _answer(request, state, "transcribe")


async def translations(request: Request, state: needs.Transcriptions) -> Response:
    """Return the text of an audio file, in English. Raises ApiError."""
    return await _answer(request, state, "translate")


async def _answer(request: Request, state: needs.Transcriptions, task: str) -> Response:
    state.require_ready()
    model = state.speech.require()
    _require_program(request)
    most = state.speech.max_bytes + MAX_FORM_BYTES

    def refusal():
        return too_large(state.speech.max_bytes)

    is_json = request.headers.get("content-type", "").startswith("application/json")
    size = declared_size(request, most, refusal)
    room = state.speech.hold((size or most) if not is_json else MAX_BYTES)
    form, keep = FormData(), False  # whether a stream still reads
    try:
        if is_json:
            body = await read_body(request, state, MAX_BYTES)
            form = await in_turns(request, state, len(body), partial(form_of, body))
            del body
        else:
            form = await read_form(request, most, refusal, "Audio, in the field file,", max_fields=64)
        fields = read_fields(form, state.config.server.strict_params)
        if fields.ignored:
            caller(request).ignored = fields.ignored
        identity = admission.admit(request, state, ID_PREFIX, model=fields.model)
        if identity["adapters"]:
            raise BadRequest("LoRA adapters do not transcribe.", param="model")
        check_model(fields, model, task)
        before = _tokens_before(fields.prompt, state)
        pieces = await sse.unless_disconnected(request, _open(fields, state, caller(request).turn))
        base = GenerationRequest(
            request_id=identity["request_id"],
            prompt_token_ids=[*model.longest_prompt(), *before],
            sampling=SamplingParams(),
            priority=identity["priority"],
            background=identity["background"],
        )
        limits = replace(request_options.deadlines(request, state), queue=None, first_token=None)
        request_options.reserve_room(request, state, [base], "file")
        account = caller(request).account
        spec = TranscriptionSpec(
            base=base,
            task=task,
            language=fields.language,
            before=before,
            temperature=fields.temperature,
            timestamps=fields.response_format in TIMED,
            words=fields.words,
            follows=fields.follows,
            **({} if account is None else {"observed": account.observed}),
        )
        answer = Answer(fields, state, transcription_of(state, spec, pieces))
        if fields.stream:
            keep = True
            frames = _closing(answer.frames(limits.total), form, room)
            stream = sse.to_the_end(frames, base.request_id, done=b"")
            return sse.EventStream(stream, state.config.server.sse_keep_alive_interval)
        return await sse.unless_disconnected(request, within(answer.whole(), limits, _never))
    finally:
        if not keep:
            await form.close()
            room.release()


def _require_program(request: Request) -> None:
    """Refuse forms from other sites' web pages, which browsers send without a CORS preflight."""
    headers = request.headers
    from_page = "origin" in headers or "sec-fetch-site" in headers
    own = headers.get("sec-fetch-site") == "same-origin"  # browsers say so themselves: this server's page
    deliberate = any(name in headers for name in ("x-requested-with", "authorization", "x-api-key"))
    if from_page and not own and not deliberate:
        raise UnsupportedMediaType("A form from a web page must be sent with an X-Requested-With header.")


def _tokens_before(prompt: str, state: needs.Transcriptions) -> list[int]:
    """Return the last tokens of a prompt. Raises BadRequest for special tokens in it."""
    if not prompt.strip():
        return []
    try:
        return state.speech.require().before(state.tokenizer, prompt, most_before(state.model))
    except ValueError as error:
        raise BadRequest(str(error), param="prompt") from None


async def _open(fields: Fields, state: needs.Transcriptions, turn: str) -> Pieces:
    from quire.server.media.audio.windows import Cutting

    vad, usual = fields.vad, Cutting()
    cutting = Cutting(
        vad.get("threshold", usual.threshold),
        vad.get("silence_duration_ms", 1000 * usual.silence) / 1000,
        vad.get("prefix_padding_ms", 1000 * usual.padding) / 1000,
    )
    upload = fields.upload
    return await state.speech.open_file(upload.file, upload.size or 0, cutting, turn)


async def _never() -> bool:
    return False


async def _closing(frames: AsyncGenerator[bytes, None], form: FormData, room: Room) -> AsyncGenerator[bytes, None]:
    """Yield `frames`, then close the form's file and release its room."""
    try:
        async with aclosing(frames):
            async for frame in frames:
                yield frame
    finally:
        await form.close()
        room.release()


class Answer:
    """Writes the texts of the pieces, whole or as events."""

    def __init__(self, fields: Fields, state: needs.Transcriptions, transcription: Transcription):
        self.fields, self.state, self.transcription = fields, state, transcription
        self.said: list[Said] = []

    async def whole(self) -> Response:
        """Return the answer to a request without `stream`."""
        async with aclosing(self.transcription.texts()) as found:
            async for said in found:
                self.said.append(said)
        text = "".join(map(self._joined, range(len(self.said))))
        segments = [segment for said in self.said for segment in said.segments]
        match self.fields.response_format:
            case "text":
                return PlainTextResponse(text + "\n")
            case "srt":
                return PlainTextResponse(subtitles.srt(segments), media_type="application/x-subrip")
            case "vtt":
                return PlainTextResponse(subtitles.vtt(segments), media_type="text/vtt")
            case "verbose_json":
                return sse.JsonResponse(self._verbose(text))
        logprobs = self._logprobs(self.said) if self.fields.logprobs else UNSET
        return sse.JsonResponse(objects.Transcription(text=text, logprobs=logprobs, usage=self._duration()))

    async def frames(self, total: float | None) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream: one per piece, then the whole text. Raises GatewayTimeout after `total`
        seconds.
        """
        loop, text = asyncio.get_running_loop(), ""
        end = None if total is None else loop.time() + total
        async with aclosing(self.transcription.texts()) as found:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        said = await anext(found, None)
                except TimeoutError:
                    raise GatewayTimeout("The time that the request has has passed.") from None
                if said is None:
                    break
                self.said.append(said)
                if delta := self._joined(len(self.said) - 1):
                    text += delta
                    logprobs = self._logprobs([said]) if self.fields.logprobs else UNSET
                    yield sse.event(msgspec.json.encode(objects.TextDelta(delta=delta, logprobs=logprobs)))
        logprobs = self._logprobs(self.said) if self.fields.logprobs else UNSET
        done = objects.TextDone(text=text, logprobs=logprobs, usage=self._tokens())
        yield sse.event(msgspec.json.encode(done))

    def _joined(self, number: int) -> str:
        """Return the text of a piece, with the separator before it."""
        text = self.said[number].text.strip()
        if not text or not any(said.text.strip() for said in self.said[:number]):
            return text
        return gap(self.transcription.language) + text

    def _verbose(self, text: str) -> objects.VerboseTranscription:
        code, task = self.transcription.language or "", self.transcription.spec.task
        return objects.VerboseTranscription(
            task=task,
            language=NAMES.get("en" if task == "translate" else code, code),
            duration=round(self.transcription.pieces.seconds, 3),
            text=text,
            segments=self._segments() if self.fields.segments else UNSET,
            words=[word for said in self.said for word in said.words] if self.fields.words else UNSET,
            usage=self._duration(),
        )

    def _segments(self) -> list[objects.TranscriptionSegment]:
        found = [(said, segment) for said in self.said for segment in said.segments]
        return [self._segment(number, *one) for number, one in enumerate(found)]

    def _segment(self, number: int, said: Said, segment: Segment) -> objects.TranscriptionSegment:
        return objects.TranscriptionSegment(
            number,
            round(said.piece.start * 100),
            segment.start,
            segment.end,
            segment.text,
            segment.token_ids,
            said.temperature,
            said.avg_logprob,
            said.compression_ratio,
            said.no_speech,
        )

    def _logprobs(self, said: list[Said]) -> list[objects.Logprob]:
        found = []
        for one in said:
            for token, entry in zip(one.token_ids, one.logprobs, strict=True):
                raw = self.state.tokenizer.token_bytes(token)
                found.append(objects.Logprob(raw.decode(errors="replace"), entry.logprobs[0], list(raw)))
        return found

    def _duration(self) -> objects.DurationUsage:
        return objects.DurationUsage(math.ceil(self.transcription.pieces.seconds))

    def _tokens(self) -> objects.TokenUsage:
        audio = math.ceil(self.transcription.pieces.seconds / self.transcription.model.step)
        text, output = (sum(getattr(said, name) for said in self.said) for name in ("num_prompt", "num_output"))
        details = {"audio_tokens": audio, "text_tokens": text}
        return objects.TokenUsage(audio + text, output, audio + text + output, details)
