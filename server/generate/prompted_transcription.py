"""Pieces of audio -> their texts, by a model that continues a chat: it writes the language and then the text."""

from __future__ import annotations

import itertools

from quire.engine.messages import MediaItem, SamplingParams, TokenLogprobs
from quire.server.generate import needs
from quire.server.generate.transcription import Said, Segment, Transcription, TranscriptionSpec
from quire.server.media.audio.languages import code_of
from quire.server.media.audio.prompted import PromptedSpeechModel
from quire.server.media.audio.service import Piece, Pieces
from quire.server.media.inputs import PreparedPart

_serial = itertools.count()


class PromptedTranscription(Transcription):
    """The client's prompt precedes each piece. A piece is one segment."""

    model: PromptedSpeechModel
    needs_language = False

    async def _attempt(self, piece: Piece, before: list[int], temperature: float) -> Said:
        num_embeds = piece.lease.medium.num_tokens
        prompt = self.model.prompt(self.spec.language, self.spec.before, num_embeds)
        sampling = SamplingParams(
            max_tokens=min(self.model.max_output, self.state.model.max_model_len - len(prompt)),
            temperature=temperature,
            seed=next(_serial) if temperature else 0,
            eos_token_ids=list(self.model.ends),
            logprobs=0,
            logprobs_mode="raw_logprobs" if temperature else "processed_logprobs",
        )
        ids, logprobs, _ = await self._run(piece, prompt, sampling)
        said = self._read(piece, ids, logprobs)
        said.temperature, said.num_prompt = temperature, len(prompt) - num_embeds
        return said

    def _read(self, piece: Piece, ids: list[int], logprobs: list[TokenLogprobs]) -> Said:
        said = Said(piece, avg_logprob=sum(entry.logprobs[0] for entry in logprobs) / max(len(ids), 1))
        said.num_output = len(ids)
        first = 0
        if self.spec.language is None and self.model.text_mark in ids:
            first = ids.index(self.model.text_mark) + 1
            said.language = self._language(ids[: first - 1])
        kept = [i for i in range(first, len(ids)) if ids[i] not in self.model.special]
        said.take_text([ids[i] for i in kept], [logprobs[i] for i in kept], self._text([ids[i] for i in kept]))
        if self.spec.timestamps and said.text.strip():
            end = round(piece.start + piece.seconds, 2)
            said.segments = [Segment(round(piece.start, 2), end, said.token_ids, said.text)]
        return said

    def _language(self, ids: list[int]) -> str | None:
        """Return the code of the language that the model names; None without speech, or if it is not known."""
        code = code_of(self._text(ids).strip().removeprefix("language "))
        return code if code in self.model.codes else None

    def _item(self, window: PreparedPart) -> MediaItem:
        count = window.num_tokens
        return MediaItem(window.key, self.model.start_of_audio(self.spec.before), count, count, window.path)


def transcription_of(state: needs.Transcribing, spec: TranscriptionSpec, pieces: Pieces) -> Transcription:
    """Return the transcription of one file, as the served model does it."""
    prompted = isinstance(state.speech.require(), PromptedSpeechModel)
    return (PromptedTranscription if prompted else Transcription)(state, spec, pieces)
