"""`quire bench audio`: figures against a server with a known delay, and arithmetic."""

from __future__ import annotations

import io
import json
import wave

import numpy as np
import pytest

from quire.cli import main as cli
from quire.cli.bench import audio
from tests.helpers.models.sounds import wav
from tests.helpers.server.fake_openai import FakeOpenAI


@pytest.fixture
def server():
    with FakeOpenAI(first_delay=0.1) as server:
        yield server


def bench(server: FakeOpenAI, *arguments: str) -> int:
    return cli.main(["bench", "audio", "--port", str(server.port), "--disable-tqdm", *arguments])


@pytest.mark.slow
def test_figures_of_a_server_with_a_known_delay(server, tmp_path):
    file, out = tmp_path / 'a "1".wav', tmp_path / "out.json"
    file.write_bytes(wav(np.zeros(16_000 * 5, np.float32)))
    options = ["--num-prompts", "6", "--max-concurrency", "1,3", "--language", "en", "--result-filename", str(out)]
    assert bench(server, str(file), *options) == 0
    one, three = json.loads(out.read_text())
    assert (one["completed"], one["failed"], one["audio_seconds"]) == (6, 0, 30.0)
    assert one["p50_latency_ms"] >= 100 and one["p50_request_rtf"] >= 0.02
    assert one["duration"] >= 0.6 and three["duration"] < one["duration"]
    assert one["rtf"] == pytest.approx(one["duration"] / 30)
    assert [form["language"] for form in server.forms] == ["en"] * 13
    assert server.forms[0]["file"] == file.read_bytes()


@pytest.mark.slow
def test_tones_and_files_of_unknown_length(server, tmp_path, capsys):
    assert bench(server, "--seconds", "1.5", "--num-prompts", "2") == 0
    assert "Audio (s)                                          3.000" in capsys.readouterr().out
    file = tmp_path / "a.mp3"
    file.write_bytes(b"ID3")
    assert bench(server, str(file)) == 0  # the answer says 7 seconds
    assert "Audio (s)                                          7.000" in capsys.readouterr().out


@pytest.mark.slow
def test_errors(server, capsys, tmp_path):
    with pytest.raises(SystemExit):
        bench(server, str(tmp_path / "missing.wav"))
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench(server, "--language", "xx", "--seconds", "1")
    assert "the first request failed: HttpError: HTTP 400" in capsys.readouterr().err


def test_tones_are_a_wav_file_that_no_cache_has():
    first, second = audio.tones(0, 1.25), audio.tones(1, 1.25)
    assert first != second and audio.wav_seconds(first) == 1.25 and audio.wav_seconds(b"ID3") is None
    with wave.open(io.BytesIO(first)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert np.abs(samples).max() == 8000


def test_summary():
    results = [audio.Result(1.0, 10.0, 5), audio.Result(3.0, 10.0, 7), audio.Result(error="no")]
    figures = audio.summarize(results, 4.0, [50.0])
    assert figures["rtf"] == 0.2 and figures["audio_throughput"] == 5.0 and figures["characters"] == 12
    assert figures["p50_latency_ms"] == 2000 and figures["p50_request_rtf"] == pytest.approx(0.2)
    assert (figures["completed"], figures["failed"]) == (2, 1)
