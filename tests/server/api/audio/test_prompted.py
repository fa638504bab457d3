"""The routes of audio over a small random Qwen3-ASR: prompts and texts are those of transformers' processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.models.sounds import wav
from tests.helpers.models.speech_models import build_qwen3_asr, sound
from tests.helpers.server.running import MODEL, running_server

pytestmark = pytest.mark.slow
SETTINGS = {"distributed_executor_backend": "uniproc", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
TEMPLATE = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<|audio_start|>{audio}<|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\n{named}"
)

CASES = (  # seed, seconds, fields, beginning of the answer
    (1, 2.0, {}, ""),
    (2, 0.3, {"language": "en"}, "language English<asr_text>"),
    (3, 3.14159, {"prompt": " a bridge ", "language": "Cantonese"}, "language Cantonese<asr_text>"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-asr")
    return build_qwen3_asr(folder, tied=False), str(folder)


@pytest.fixture(scope="module")
def references(built) -> list[str]:
    """Before the server: its thread may import while transformers reads its modules."""
    return [reference(*built, *case) for case in CASES]


@pytest.fixture(scope="module")
def server(built, references):
    with pytest.MonkeyPatch.context() as patch:
        module = "quire.server.generate.transcription"
        patch.setattr(f"{module}.LEAST_LOGPROB", -1000.0)  # random models fail the thresholds
        patch.setattr(f"{module}.MOST_COMPRESSION", 1000.0)
        with running_server(built[1], max_model_len="480", **SETTINGS) as running:
            yield running.wait_ready(120)


def reference(model, folder: str, seed: int, seconds: float, fields: dict[str, str], named: str) -> str:
    """The greedy text of transformers, by its own feature extractor."""
    from transformers import Qwen3ASRFeatureExtractor

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    samples = (sound(seed, seconds) * 32767).astype("<i2").astype(np.float32) / 32768
    extract = Qwen3ASRFeatureExtractor(feature_size=32)
    made = extract(samples, sampling_rate=16_000, padding=True, return_attention_mask=True)
    features = {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}
    with torch.inference_mode():
        num = len(model.model.get_audio_features(**features).pooler_output)
    prompt = TEMPLATE.format(system=fields.get("prompt", "").strip(), audio="<|audio_pad|>" * num, named=named)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    out = model.generate(input_ids=ids, **features, max_length=480, do_sample=False)[0, ids.shape[1] :].tolist()
    mark = tokenizer.token_to_id("<asr_text>")
    return tokenizer.decode([token for token in out if token != mark], skip_special_tokens=True).strip()


def test_texts_are_transformers_texts(server, references):
    create = server.openai.audio.transcriptions.create
    asked = [(("a.wav", wav(sound(seed, seconds))), fields) for seed, seconds, fields, _ in CASES]
    assert [create(model=MODEL, file=file, **fields).text for file, fields in asked] == references
    assert len(set(references)) == len(CASES)


def test_formats_and_streams(server):
    file = ("a.wav", wav(np.concatenate([sound(4, 31.0), np.zeros(8000, np.float32), sound(5, 3.0)])))
    post = server.http.post
    verbose = post("/v1/audio/transcriptions", files={"file": file}, data={"response_format": "verbose_json"}).json()
    segments = verbose["segments"]
    assert len(segments) == 2 and segments[0]["end"] == segments[1]["start"] and verbose["duration"] == 34.5
    assert verbose["text"].split() == " ".join(one["text"] for one in segments).split()
    srt = post("/v1/audio/transcriptions", files={"file": file}, data={"response_format": "srt"}).text
    assert srt.count(" --> ") == 2
    create = server.openai.audio.transcriptions.create
    events = list(create(model=MODEL, file=file, stream=True, include=["logprobs"]))
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == verbose["text"]
    tokens = b"".join(bytes(one.bytes) for one in events[-1].logprobs).decode(errors="ignore")
    assert tokens.split() == events[-1].text.replace("\N{REPLACEMENT CHARACTER}", "").split()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "xx"}, "language 'xx' is not one of this model's: ar, yue, zh"),
        ({"condition_on_previous_text": "true"}, "each piece is transcribed by itself"),
        ({"prompt": "a <|audio_pad|>"}, "prompt must not contain special tokens"),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
            "the model has no timestamps of words",
        ),
    ],
)
def test_refused_fields(server, fields, message):
    answer = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(sound(1)))}, data=fields)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_other_routes_say_what_the_model_does(server):
    file = {"file": ("a.wav", wav(sound(1)))}
    assert "it transcribes only" in server.http.post("/v1/audio/translations", files=file).json()["error"]["message"]
    answer = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert answer.status_code == 400 and "The model transcribes audio" in answer.json()["error"]["message"]
    card = server.http.get("/v1/models").json()["data"][0]
    assert card["capabilities"] == ["transcription"]


def test_the_language_before_the_text(server):
    """A trained model names it; texts without a mark are texts."""
    from quire.engine.messages import SamplingParams, TokenLogprobs
    from quire.server.generate.prompted_transcription import PromptedTranscription
    from quire.server.generate.transcription import TranscriptionSpec
    from quire.server.media.audio.service import Piece
    from quire.server.request.generation_request import GenerationRequest

    spec = TranscriptionSpec(base=GenerationRequest("1", [0], SamplingParams()))
    transcription = PromptedTranscription(server.state, spec, None)
    for text, language, said in (
        ("language Cantonese<asr_text> bridges", "yue", " bridges"),
        ("language None<asr_text>", None, ""),
        ("language Klingon<asr_text> bridges", None, " bridges"),
        ("bridges", None, "bridges"),
    ):
        ids = server.state.tokenizer.encode(text, add_special_tokens=False)
        found = transcription._read(Piece(0.0, 1.0, None), ids, [TokenLogprobs([one], [0.0], 1) for one in ids])
        assert (found.language, found.text) == (language, said)
        assert len(found.logprobs) == len(found.token_ids)
