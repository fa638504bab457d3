"""OpenAI's objects for transcriptions."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.generate.transcription import TimedWord


class DurationUsage(msgspec.Struct):
    seconds: float
    type: str = "duration"


class TokenUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: dict[str, int]
    type: str = "tokens"


class Logprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Transcription(msgspec.Struct, kw_only=True):
    text: str
    logprobs: list[Logprob] | UnsetType = UNSET
    usage: DurationUsage


class TranscriptionSegment(msgspec.Struct):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: list[TimedWord] | UnsetType = UNSET
    usage: DurationUsage


class TextDelta(msgspec.Struct, kw_only=True):
    type: str = "transcript.text.delta"
    delta: str
    logprobs: list[Logprob] | UnsetType = UNSET


class TextDone(msgspec.Struct, kw_only=True):
    type: str = "transcript.text.done"
    text: str
    logprobs: list[Logprob] | UnsetType = UNSET
    usage: TokenUsage
