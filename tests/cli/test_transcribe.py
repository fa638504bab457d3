"""`quire transcribe` over a small random Whisper."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from tests.helpers.models.sounds import wav
from tests.helpers.models.speech_models import build_whisper, sound


@pytest.mark.slow
def test_files_and_formats(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    build_whisper(tmp_path / "model", max_target_positions=24, encoder_layers=1, decoder_layers=2)
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(wav(sound(1, 2.0)))
    (tmp_path / "c.wav").write_bytes(b"no audio")
    flags = ["--model", str(tmp_path / "model"), "--language", "en", "--dtype", "float32", "--device", "cpu"]
    out = ["--format", "json", "--output-dir", str(tmp_path / "out")]
    assert main(["transcribe", str(tmp_path / "a.wav"), str(tmp_path / "c.wav"), *flags, *out]) == 1
    assert "c.wav: " in capsys.readouterr().err
    found = json.loads((tmp_path / "out/a.wav.json").read_text())
    assert found["duration"] == 2.0 and found["language"] == "en" and found["segments"]
    assert not (tmp_path / "out/c.wav.json").exists()
    assert main(["transcribe", str(tmp_path / "a.wav"), *flags, "--format", "srt"]) == 0
    assert capsys.readouterr().out.startswith("1\n00:00:00,")
    assert main(["transcribe", str(tmp_path / "a.wav"), str(tmp_path / "b.wav"), *flags]) == 0
    text = capsys.readouterr().out  # of a random model, at rising temperatures
    assert text.startswith(f"{tmp_path / 'a.wav'}:\n") and f"\n{tmp_path / 'b.wav'}:\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.wav"], "there is no file none.wav"),
        ([__file__, __file__, "--format", "srt"], "--format srt of several files needs --output-dir"),
        ([__file__, "--format", "mp4"], "invalid choice"),
        ([], "required: FILE"),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["transcribe", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_text_is_refused(capsys, tmp_path, checkpoint):
    (tmp_path / "a.wav").write_bytes(wav(sound(1, 0.5)))
    assert main(["transcribe", str(tmp_path / "a.wav"), "--model", checkpoint("qwen3"), "--device", "cpu"]) == 1
    assert "transcribe" in capsys.readouterr().err
