"""Whisper base on speech by espeak-ng: texts are those of transformers, at every speed, rate and number of channels;
long files are the sum of their sentences; silence and noise have no text.

QUIRE_WHISPER is the folder of a Whisper model of transformers that knows English.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import shutil
import subprocess
import wave

import numpy as np
import pytest
import torch

from quire.server.media.audio.features import RATE, log_mel
from quire.server.media.audio.resample import Resampler
from tests.helpers.models.sounds import wav
from tests.helpers.server.running import MODEL, poll, running_server

WHISPER = os.environ.get("QUIRE_WHISPER")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not WHISPER, reason="QUIRE_WHISPER names no Whisper model"),
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed"),
]
SENTENCES = """
The history of the bridge began in the spring, when the engineers measured the river.
Every morning the baker opened the shop before sunrise.
She wrote a long letter to her brother, who lived on the other side of the mountains.
In the middle of the winter the train stopped between two stations.
The scientist explained that the machine could count every drop of rain.
Nobody believed the sailor when he told them about the island.
After the meeting the president answered questions about the new school.
The farmer counted his sheep twice, because one of them had jumped over the fence.
A small garden behind the house was full of red and yellow flowers.
The library closes at six on weekdays and at noon on Saturdays.
My sister bought a green bicycle with the money from her first job.
The doctor asked the patient to breathe slowly and to count to twenty.
We walked along the beach until the sun went down behind the hills.
The children built a castle of sand, and the water carried it away.
He could not remember the name of the street or the number of the house.
The museum shows three hundred paintings from seven countries.
Please close the window before the rain comes into the kitchen.
The old clock in the tower has not worked since last summer.
They planted forty trees along the road to the village.
A good teacher listens before she answers a question.
""".strip().splitlines()
FORMS = [  # espeak's words per minute, loudness of noise, rate, channels
    (150, 0.0, 16_000, 1),
    (175, 0.0, 8_000, 1),
    (200, 0.0, 44_100, 2),
    (175, 0.01, 16_000, 1),
]


def spoken(text: str, speed: int = 165) -> np.ndarray:
    """Speech at 16 kHz."""
    made = subprocess.run(["espeak-ng", "-s", str(speed), "--stdout", text], capture_output=True, check=True).stdout
    samples = np.frombuffer(made[44:], "<i2").astype(np.float32) / 32768
    return resampled(samples, 22_050, RATE)


def resampled(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    resampler = Resampler(rate, target)
    return np.concatenate([resampler.push(samples), resampler.push(np.zeros(0, np.float32), last=True)])


def files() -> list[tuple[str, bytes]]:
    """40 (sentence, file)s, each sentence in two forms."""
    found, rng = [], np.random.default_rng(1)
    for number, text in enumerate([*SENTENCES, *SENTENCES]):
        speed, noise, rate, channels = FORMS[(number + number // len(SENTENCES)) % len(FORMS)]
        samples = spoken(text, speed)
        samples = (samples + noise * rng.standard_normal(len(samples)).astype(np.float32)).clip(-1, 1)
        found.append((text, wav(samples if rate == RATE else resampled(samples, RATE, rate), rate, channels)))
    return found


@pytest.fixture(scope="module")
def server():
    settings = {"distributed_executor_backend": "uniproc", "dtype": "float32", "kv_cache_memory_bytes": 1 << 30}
    with running_server(WHISPER, max_model_len="auto", **settings) as running:
        yield running.wait_ready(600)


def transcribe(server, content: bytes, **fields):
    fields = {"language": "en"} | fields
    client = server.openai.with_options(timeout=900, max_retries=0)
    return client.audio.transcriptions.create(model=MODEL, file=("a.wav", content), **fields)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def distance(said: list[str], heard: list[str]) -> int:
    """Words to change, insert or delete."""
    row = list(range(len(heard) + 1))
    for i, one in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, start=1):
            before, row[j] = row[j], min(before + (one != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def samples_of(content: bytes) -> np.ndarray:
    """The samples at 16 kHz that a file stands for."""
    with wave.open(io.BytesIO(content)) as file:
        rate, channels = file.getframerate(), file.getnchannels()
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    samples = data.reshape(-1, channels).mean(1, dtype=np.float32)
    return samples if rate == RATE else resampled(samples, rate, RATE)


def test_forty_files_as_transformers(server, capsys):
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    different, wrong, as_wrong, total = [], 0, 0, 0
    for text, content in files():
        heard = transcribe(server, content).text
        features = torch.from_numpy(log_mel(samples_of(content), model.config.num_mel_bins, 3000))[None]
        out = model.generate(features, language="en", task="transcribe", num_beams=1)[0].tolist()
        reference = server.state.tokenizer.decode([token for token in out if token < end]).strip()
        if heard != reference:
            different.append((heard, reference))
        wrong, total = wrong + distance(words(text), words(heard)), total + len(words(text))
        as_wrong += distance(words(text), words(reference))
    with capsys.disabled():
        print(f"\nword error rate {wrong / total:.3f} over {total} words (transformers {as_wrong / total:.3f})")
        print(f"{len(different)} texts of 40 differ: {different}")
    assert not different
    assert wrong <= as_wrong


def test_twenty_minutes_are_the_sum_of_the_sentences(server):
    """With a second of silence between them no cut falls into a sentence."""
    silence = np.zeros(RATE, np.float32)
    clips = [np.concatenate([spoken(text), silence]) for text in SENTENCES]
    rounds = int(1200 / (sum(map(len, clips)) / RATE)) + 1
    answer = transcribe(server, wav(np.concatenate(clips * rounds)), response_format="verbose_json")
    assert answer.duration >= 1200
    said = [word for text in SENTENCES * rounds for word in words(text)]
    error = distance(said, words(answer.text)) / len(said)
    alone = sum(
        distance(words(text), words(transcribe(server, wav(clip)).text)) for text, clip in zip(SENTENCES, clips)
    )
    assert error <= alone * rounds / len(said) + 0.05
    starts = [segment.start for segment in answer.segments]
    assert starts == sorted(starts) and all(one.end <= answer.duration for one in answer.segments)
    assert starts[-1] > answer.duration - 60


@pytest.mark.parametrize("loudness", [0.0, 0.003, 0.05])
def test_ten_minutes_without_speech_have_no_text(server, loudness):
    noise = loudness * np.random.default_rng(2).standard_normal(600 * RATE).astype(np.float32)
    assert transcribe(server, wav(noise.clip(-1, 1))).text == ""


def test_stream_is_the_whole_text(server):
    content = wav(np.concatenate([spoken(text) for text in SENTENCES[:12]]))
    events = list(transcribe(server, content, stream=True))
    assert len(events) > 2
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == transcribe(server, content).text


def test_uploads_that_are_aborted_leave_nothing(server):
    content, rng = wav(np.concatenate([spoken(text) for text in SENTENCES])), random.Random(3)

    async def one(client, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await client.audio.transcriptions.create(model=MODEL, file=("a.wav", content), language="en")
        except TimeoutError:
            pass

    async def run() -> None:
        async with server.aopenai() as client:
            await asyncio.gather(*(one(client, rng.uniform(0.05, 4)) for _ in range(16)))

    asyncio.run(run())
    speech, store = server.state.speech, server.state.speech._store
    poll(lambda: server.state.num_in_flight == 0 and server.state.client.num_open == 0, 60)
    poll(lambda: store.num_bytes == 0 and speech._num_bytes == 0, 60)
    assert not list(store._own_folder().glob("*.safetensors"))

    def usage() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        (value,) = {line.split()[-1] for line in lines if line.startswith("vllm:kv_cache_usage_perc{")}
        return float(value)

    poll(lambda: usage() == 0.0, 60)  # the engine aborts between two steps
    assert transcribe(server, wav(spoken(SENTENCES[1]))).text
