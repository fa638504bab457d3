"""The results of `LLM.transcribe`."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.engine.messages import SamplingParams
from quire.server.errors import BadRequest
from quire.server.generate.prompted_transcription import transcription_of
from quire.server.generate.transcription import Said, Segment, TimedWord, TranscriptionSpec
from quire.server.http import needs
from quire.server.media.audio.languages import asked_code, gap
from quire.server.request.generation_request import GenerationRequest

AudioFile = str | os.PathLike[str] | bytes
MAX_FILES = 4  # at once
TURN = ""  # all of a process is one tenant


@dataclass(slots=True)
class TranscriptionOutput:
    """The text of a file of `duration` seconds. `language` is a code, None without speech."""

    text: str
    language: str | None
    duration: float
    segments: list[Segment]
    words: list[TimedWord]


async def transcribe_file(
    state: needs.Transcribing,
    request_id: str,
    audio: AudioFile,
    *,
    task: str,
    language: str | None,
    temperature: float,
    timestamps: bool,
    word_timestamps: bool,
) -> TranscriptionOutput:
    """Transcribe one file. Raises BadRequest."""
    from quire.server.media.audio.windows import Cutting

    model = state.speech.require()
    code = asked_code(language)
    if code is not None and code not in model.codes:
        raise BadRequest(f"language {language!r} is not one of this model's: {', '.join(model.codes)}")
    if task != "transcribe" and task not in model.tasks:
        raise BadRequest(f"task {task!r} is not one of this model's: {', '.join(model.tasks) or 'transcribe'}")
    if word_timestamps and not model.alignment_heads:
        raise BadRequest("word_timestamps: the model's files have no alignment_heads")
    base = GenerationRequest(request_id=request_id, prompt_token_ids=model.longest_prompt(), sampling=SamplingParams())
    spec = TranscriptionSpec(
        base=base,
        task=task,
        language=code,
        temperature=temperature,
        timestamps=timestamps or word_timestamps,
        words=word_timestamps,
    )
    with ExitStack() as stack:
        file, size = _opened(audio, stack)
        pieces = await state.speech.open_file(file, size, Cutting(), TURN)
        transcription = transcription_of(state, spec, pieces)
        async with aclosing(transcription.texts()) as found:
            said = [one async for one in found]
    text = joined(said, transcription.language)
    segments = [segment for one in said for segment in one.segments]
    words = [word for one in said for word in one.words]
    return TranscriptionOutput(text, transcription.language, pieces.seconds, segments, words)


def joined(said: list[Said], language: str | None) -> str:
    """Return the texts of the pieces as one."""
    texts = (one.text.strip() for one in said)
    return gap(language).join(text for text in texts if text)


def _opened(audio: AudioFile, stack: ExitStack) -> tuple[BinaryIO, int]:
    if isinstance(audio, bytes):
        return io.BytesIO(audio), len(audio)
    path = Path(audio)
    try:
        return stack.enter_context(path.open("rb")), path.stat().st_size
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from None
