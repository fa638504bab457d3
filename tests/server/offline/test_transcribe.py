"""`LLM.transcribe` over a small random Whisper."""

from __future__ import annotations

import pytest

from quire import LLM
from tests.helpers.models.sounds import wav
from tests.helpers.models.speech_models import build_whisper, sound

pytestmark = pytest.mark.slow


def test_files_and_bytes(tmp_path):
    (tmp_path / "model").mkdir()
    build_whisper(tmp_path / "model", max_target_positions=24, encoder_layers=1, decoder_layers=2)
    data = wav(sound(1, 2.0))
    (tmp_path / "a.wav").write_bytes(data)
    llm = LLM(str(tmp_path / "model"), dtype="float32", kv_cache_memory_bytes=64 << 20)
    options = {"language": "en", "temperature": 0.0, "use_tqdm": False}
    (one,) = llm.transcribe(tmp_path / "a.wav", timestamps=True, **options)
    assert one.duration == 2.0 and one.language == "en" and one.segments
    assert all(0 <= segment.start <= segment.end <= 2.0 for segment in one.segments)
    both = llm.transcribe([str(tmp_path / "a.wav"), wav(sound(1, 0.0))], **options)
    assert [found.duration for found in both] == [2.0, 0.0] and both[1].text == ""
    for audio, wrong, message in (
        (data, {"language": "xx"}, "'xx' is not one of this model's: "),
        (data, {"task": "sing"}, "task 'sing' is not one of"),
        (b"text", {}, "its container is not known"),
        (tmp_path / "none.wav", {}, "cannot read .*none.wav: No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.transcribe(audio, use_tqdm=False, **wrong)
    with pytest.raises(ValueError, match="The model transcribes audio"):
        llm.generate("hello", use_tqdm=False)
