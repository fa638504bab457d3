"""Pieces of audio -> their texts: each piece is a request of its own, several at once, with Whisper's rules for
attempts at higher temperatures and for silence.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from quire.engine.messages import Alignment, MediaItem, PoolingParams, SamplingParams, TokenLogprobs
from quire.server.errors import EngineError
from quire.server.generate import deltas, needs, pooling
from quire.server.generate.generation import Generation
from quire.server.media.audio.languages import gap
from quire.server.media.audio.model import STEP, SpeechModel
from quire.server.media.audio.service import Piece, Pieces
from quire.server.media.inputs import PreparedPart
from quire.server.model_info import ModelInfo
from quire.server.request.delta import Delta
from quire.server.request.generation_request import Attached, GenerationRequest

PARALLEL = 8  # pieces of one request at once
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # for the attempts
MOST_COMPRESSION, LEAST_LOGPROB, NO_SPEECH = 2.4, -1.0, 0.6  # Whisper's thresholds
PERHAPS_NO_SPEECH = 0.3  # the same after attempts that all fail: steady noise has 0.4
_MOST_BEFORE = 224  # tokens of text before the audio, at most half of the context
_FORGETS = 0.5  # temperature above which the next piece is not prompted with the text
_TOP = 20  # log-probabilities searched for that of silence
_serial = itertools.count()

Observed = Callable[[AsyncGenerator[Delta, None]], AsyncGenerator[Delta, None]]


def most_before(model: ModelInfo) -> int:
    """Return the maximum number of text tokens before the audio."""
    return min(_MOST_BEFORE, model.max_model_len // 2)


@dataclass(slots=True, kw_only=True)
class TranscriptionSpec:
    """The parameters of one file. `base` has the id, tenant and priority of the engine's requests."""

    base: GenerationRequest
    task: str = "transcribe"
    language: str | None = None  # a code; None: it is detected in the first piece with sound
    before: list[int] = field(default_factory=list)  # tokens of the text that the first piece follows
    temperature: float = 0.0  # 0: Whisper's attempts
    timestamps: bool = False
    words: bool = False  # also the times of words; needs `timestamps`
    follows: bool = False  # each piece is prompted with the previous text: they run one by one
    observed: Observed = lambda found: found


@dataclass(slots=True)
class TimedWord:
    """A word, with seconds from the beginning of the file."""

    word: str
    start: float
    end: float


@dataclass(slots=True)
class Segment:
    """A part of a piece, with seconds from the beginning of the file."""

    start: float
    end: float
    token_ids: list[int]
    text: str
    first: int = 0  # index of its first token in the output


@dataclass(slots=True)
class Said:
    """The text of one piece. `token_ids` and `logprobs` are those of the text, without special tokens."""

    piece: Piece
    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    words: list[TimedWord] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)  # prompt and output, with special tokens
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech: float = 0.0
    num_prompt: int = 0  # tokens of text before the output
    num_output: int = 0
    language: str | None = None  # that the model names with the text

    def take_text(self, token_ids: list[int], logprobs: list[TokenLogprobs], text: str) -> None:
        self.token_ids, self.logprobs, self.text = token_ids, logprobs, text
        raw = text.encode()
        self.compression_ratio = len(raw) / len(zlib.compress(raw)) if raw else 0.0

    @property
    def repeats(self) -> bool:
        """Return whether the text repeats itself."""
        return self.compression_ratio > MOST_COMPRESSION

    @property
    def fails(self) -> bool:
        """Return whether the text repeats itself, or is unlikely."""
        return self.repeats or self.avg_logprob < LEAST_LOGPROB

    @property
    def is_silence(self) -> bool:
        """Return whether silence is likely, and the text is not."""
        return self.no_speech > NO_SPEECH and self.avg_logprob < LEAST_LOGPROB

    def silenced(self) -> Said:
        """Return the piece without text."""
        return Said(self.piece, no_speech=self.no_speech, avg_logprob=self.avg_logprob, num_output=self.num_output)


class Transcription:
    """One file. `language` is known once the first piece is."""

    needs_language = True  # the first piece gives the language before the others begin

    def __init__(self, state: needs.Transcribing, spec: TranscriptionSpec, pieces: Pieces):
        self.state, self.spec, self.pieces = state, spec, pieces
        self.model: SpeechModel = state.speech.require()
        self.language = spec.language if self.model.languages else "en"
        self.num_pieces = 0

    async def texts(self) -> AsyncGenerator[Said, None]:
        """Yield the text of each piece in order. Closing the generator aborts running requests.

        Raises BadRequest, EngineError.
        """
        running: deque[asyncio.Task[Said]] = deque()
        before, at_end = list(self.spec.before), False
        try:
            while running or not at_end:
                most = 1 if self.spec.follows or (self.needs_language and self.language is None) else PARALLEL
                if not at_end and len(running) < most:
                    piece = await self.pieces.next()
                    if piece is None:
                        at_end = True
                        continue
                    self.num_pieces += 1
                    running.append(asyncio.ensure_future(self._piece(piece, before)))
                    before = []
                    if len(running) < most:
                        continue
                said = await running.popleft()
                self.language = self.language or said.language
                if self.spec.follows and said.temperature <= _FORGETS:
                    before = said.token_ids[-most_before(self.state.model) :]
                yield said
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _piece(self, piece: Piece, before: list[int]) -> Said:
        if piece.lease is None:
            return Said(piece)
        try:
            if self.needs_language and self.language is None:
                self.language = await self._detect(piece)
            return await self._attempts(piece, before)
        finally:
            piece.lease.release()

    async def _attempts(self, piece: Piece, before: list[int]) -> Said:
        """Return the first attempt that does not fail, otherwise the best one."""
        spec, attempts = self.spec, []
        for temperature in (spec.temperature,) if spec.temperature else TEMPERATURES:
            said = await self._attempt(piece, before if temperature <= _FORGETS else [], temperature)
            if said.is_silence:
                return said.silenced()
            if not said.fails:
                break
            attempts.append(said)
        else:
            said = max(attempts, key=lambda one: (not one.repeats, one.avg_logprob))
        if said.fails and said.no_speech > PERHAPS_NO_SPEECH:
            return said.silenced()
        if spec.words and said.segments:
            said.words = await self._words(said)
        return said

    async def _detect(self, piece: Piece) -> str:
        """Return the code of the likeliest language."""
        names = {number: code for code, number in self.model.languages.items()}
        sampling = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=list(names))
        ids, _, _ = await self._run(piece, [self.model.start], sampling)
        return names[ids[0]]

    async def _no_speech(self, piece: Piece) -> float:
        """Return the probability of silence, for prompts of a single token."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=[self.model.no_speech], logprobs=0)
        _, logprobs, _ = await self._run(piece, [self.model.start], sampling)
        return math.exp(logprobs[0].logprobs[0])

    async def _attempt(self, piece: Piece, before: list[int], temperature: float) -> Said:
        model, timed = self.model, self.spec.timestamps
        prompt = model.prompt(self.language, self.spec.task, timed, before)
        start = prompt.index(model.start)
        has_next = start + 1 < len(prompt)
        sampling = SamplingParams(
            max_tokens=self.state.model.max_model_len - len(prompt),
            temperature=temperature,
            seed=next(_serial) if temperature else 0,
            eos_token_ids=[model.end],
            speech=model.rules(timed),
            logprobs=0,
            logprobs_mode="raw_logprobs" if temperature else "processed_logprobs",
            prompt_logprobs=_TOP if has_next else None,
        )
        ids, logprobs, of_prompt = await self._run(piece, prompt, sampling)
        if has_next:
            entry = of_prompt[start]
            found = dict(zip(entry.token_ids, entry.logprobs))
            no_speech = math.exp(found[model.no_speech]) if model.no_speech in found else 0.0
        else:
            no_speech = await self._no_speech(piece)
        said = self._read(piece, ids, logprobs)
        said.sequence = [*prompt, *(token for token in ids if token != model.end)]
        said.temperature, said.no_speech, said.num_prompt = temperature, no_speech, len(prompt)
        return said

    def _read(self, piece: Piece, ids: list[int], logprobs: list[TokenLogprobs]) -> Said:
        """Return the text of an attempt, and its measures."""
        total = sum(entry.logprobs[0] for entry in logprobs)
        said = Said(piece, avg_logprob=total / max(len(ids), 1), num_output=len(ids))
        kept = [i for i, token in enumerate(ids) if token < self.model.end]
        said.take_text([ids[i] for i in kept], [logprobs[i] for i in kept], self._text([ids[i] for i in kept]))
        if self.spec.timestamps:
            said.segments = self._segments(piece, ids)
        return said

    def _segments(self, piece: Piece, ids: list[int]) -> list[Segment]:
        """Return the parts between timestamps. A segment without an end lasts to the end of the piece."""
        begin, segments = self.model.timestamp_begin, []
        start, tokens = 0.0, []
        for i, token in enumerate([*ids, None]):
            if token is not None and token < self.model.end:
                tokens.append(token)
            elif token is None or token >= begin:
                at = piece.seconds if token is None else min((token - begin) * STEP, piece.seconds)
                if tokens:
                    first, last = (round(piece.start + one, 2) for one in (min(start, at), at))
                    segments.append(Segment(first, last, tokens, self._text(tokens), i - len(tokens)))
                start, tokens = at, []
        return segments

    async def _words(self, said: Said) -> list[TimedWord]:
        """Return the words of a piece with their times, from one more forward pass over its tokens."""
        model, piece, first = self.model, said.piece, said.num_prompt
        num_frames = math.ceil(round(piece.seconds / STEP * 2, 3))  # of features, two for each position
        positions = min(num_frames // 2, model.positions)
        if not positions:
            return [TimedWord(segment.text.strip(), segment.start, segment.end) for segment in said.segments]
        wanted = Alignment(model.alignment_heads, first, positions, model.median_width)
        request = self._request(piece, said.sequence, SamplingParams(max_tokens=0))
        request.pooling = PoolingParams("align", alignment=wanted)
        try:
            (found,) = await pooling.run(self.state, [request])
        finally:
            request.media[0].lease.release()
        return await self.state.speech.run(lambda: self._timed(said, found.data, positions), self.pieces.turn)

    def _timed(self, said: Said, data: bytes, positions: int) -> list[TimedWord]:
        """Return the words in an answer of the engine. Runs in a thread.

        A token starts where the previous one begins on the path: attention looks for the next token.
        """
        from quire.server.media.audio.words import read_times, split_words

        times = read_times(data, positions)
        offset, words = said.piece.start, []
        for segment in said.segments:
            for word in split_words(segment.token_ids, self._text, gap(self.language) != ""):
                first, last = segment.first + word.first, segment.first + word.last - 1
                start, end = (round(offset + at, 2) for at in (times[max(first - 1, 0)], times[last]))
                words.append(TimedWord(word.text.strip(), start, end))
        return words

    def _text(self, token_ids: list[int]) -> str:
        return self.state.tokenizer.decode(token_ids, skip_special_tokens=True)

    async def _run(
        self, piece: Piece, prompt: list[int], sampling: SamplingParams
    ) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
        """Return (tokens, their log-probabilities, those of the prompt) that the engine answers."""
        request = self._request(piece, prompt, sampling)
        generation = Generation(self.state.client, self.state.tokenizer, request, self.state.metrics)
        ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        of_prompt: list[TokenLogprobs] = []
        async with aclosing(self.spec.observed(deltas.run([generation]))) as found:
            async for delta in found:
                ids += delta.token_ids
                logprobs += delta.logprobs or []
                of_prompt += delta.prompt_logprobs or []
                if delta.finish_reason == "abort":
                    raise EngineError("The request was aborted.")
        return ids, logprobs, of_prompt

    def _request(self, piece: Piece, prompt: list[int], sampling: SamplingParams) -> GenerationRequest:
        """Return a request to the engine, which holds a lease of the piece."""
        lease, base = self.state.speech.lease(piece), self.spec.base
        return GenerationRequest(
            request_id=f"{base.request_id}-{next(_serial)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=base.priority,
            background=base.background,
            tenant=base.tenant,
            weight=base.weight,
            arrival_time=time.time(),
            media=[Attached(self._item(lease.medium.parts[0]), lease)],
            engine=base.engine,
        )

    def _item(self, window: PreparedPart) -> MediaItem:
        return MediaItem(window.key, 0, 1, self.model.positions, window.path)
