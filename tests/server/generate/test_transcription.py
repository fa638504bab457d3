"""Attempts at rising temperatures, and the rules for silence, over scripted answers of an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from quire.engine.messages import SamplingParams
from quire.server.generate.transcription import TEMPERATURES, Said, Transcription, TranscriptionSpec
from quire.server.media.audio.service import Piece
from quire.server.request.generation_request import GenerationRequest

LEASE = SimpleNamespace(release=lambda: None)


class Scripted(Transcription):
    """Answers the attempts with (mean log-probability, compression, probability of silence), in order."""

    def __init__(self, answers, **fields):
        self.spec = TranscriptionSpec(base=GenerationRequest("1", [0], SamplingParams()), **fields)
        self.answers, self.asked = list(answers), []

    async def _attempt(self, piece, before, temperature):
        self.asked.append((temperature, len(before)))
        logprob, compression, no_speech = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return Said(
            piece,
            f"at {temperature}",
            temperature=temperature,
            avg_logprob=logprob,
            compression_ratio=compression,
            no_speech=no_speech,
        )

    def run(self):
        return asyncio.run(self._attempts(Piece(0.0, 1.0, LEASE), [1, 2, 3]))


GOOD, REPEATS, UNLIKELY = (-0.5, 1.5, 0.1), (-0.2, 3.0, 0.1), (-1.5, 1.5, 0.1)


@pytest.mark.parametrize(
    ("answers", "temperatures", "text"),
    [
        ([GOOD], [0.0], "at 0.0"),
        ([REPEATS, GOOD], [0.0, 0.2], "at 0.2"),
        ([UNLIKELY, REPEATS, UNLIKELY, GOOD], [0.0, 0.2, 0.4, 0.6], "at 0.6"),
        ([UNLIKELY], list(TEMPERATURES), "at 0.0"),  # the best one, however bad it is
        ([UNLIKELY, REPEATS, (-1.2, 1.5, 0.1), UNLIKELY], list(TEMPERATURES), "at 0.4"),
        ([REPEATS, (-0.1, 3.0, 0.1), REPEATS], list(TEMPERATURES), "at 0.2"),
        ([(-1.5, 1.5, 0.7)], [0.0], ""),  # silence
        ([(-0.5, 1.5, 0.7)], [0.0], "at 0.0"),  # speech, because the text is likely
        ([(-1.5, 1.5, 0.4)], list(TEMPERATURES), ""),  # steady noise
        ([(-0.2, 3.0, 0.4)], list(TEMPERATURES), ""),  # noise that is heard as one word again and again
        ([(-1.5, 1.5, 0.4), GOOD], [0.0, 0.2], "at 0.2"),
    ],
)
def test_attempts(answers, temperatures, text):
    transcription = Scripted(answers)
    assert transcription.run().text == text
    assert [temperature for temperature, _ in transcription.asked] == temperatures


def test_a_temperature_of_the_request_is_the_only_one():
    transcription = Scripted([UNLIKELY], temperature=0.7)
    assert transcription.run().text == "at 0.7" and transcription.asked == [(0.7, 0)]


def test_hot_attempts_do_not_follow_a_text():
    transcription = Scripted([UNLIKELY])
    transcription.run()
    assert [count for _, count in transcription.asked] == [3, 3, 3, 0, 0, 0]
