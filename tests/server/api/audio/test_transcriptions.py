"""/v1/audio/transcriptions and /v1/audio/translations through the openai SDK and by hand, over a small random model."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import shutil

import numpy as np
import openai
import pytest
import torch

from quire.server.media.audio.features import log_mel
from quire.server.media.audio.words import split_words
from tests.helpers.models.sounds import wav
from tests.helpers.models.speech_models import build_whisper, sound, token_id
from tests.helpers.server.running import MODEL, poll, running_server

pytestmark = pytest.mark.slow

POSITIONS = 1500
SHORT = {"max_target_positions": 48, "encoder_layers": 1, "decoder_layers": 2}  # random models end no text
SETTINGS = {
    "distributed_executor_backend": "uniproc",
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": "auto",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return build_whisper(folder, POSITIONS, **SHORT), str(folder)


@pytest.fixture(scope="module")
def server(built, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("batches"))
    with running_server(built[1], batch_dir=folder, batch_disk=8 << 20, **SETTINGS) as running:
        yield running.wait_ready(120)


def file(seed: int = 1, seconds: float = 2.0, name: str = "a.wav") -> tuple[str, bytes]:
    return name, wav(sound(seed, seconds))


def placeholder(data: bytes) -> bytes:
    """A file whose header was written before its length was known."""
    start = data.index(b"data") + 4
    return data[:start] + b"\xff\xff\xff\x7f" + data[start + 4 :]


def heard(seed: int, seconds: float = 2.0) -> torch.Tensor:
    """The features of the 16-bit samples of `file`."""
    samples = (sound(seed, seconds) * 32767).astype("<i2").astype(np.float32) / 32768
    return torch.from_numpy(log_mel(samples, 80, 3000))[None]


def reference(model, server, seed: int, task: str = "transcribe", language: str | None = "en") -> str:
    """transformers' greedy text."""
    out = model.generate(heard(seed), language=language, task=task, max_length=48, num_beams=1)[0].tolist()
    end = token_id(model, "endofspeech")
    return server.state.tokenizer.decode([token for token in out if token < end]).strip()


@pytest.fixture
def one_attempt(monkeypatch):
    """Random models fail Whisper's thresholds, and attempts at higher temperatures are random."""
    monkeypatch.setattr("quire.server.generate.transcription.LEAST_LOGPROB", -1000.0)
    monkeypatch.setattr("quire.server.generate.transcription.MOST_COMPRESSION", 1000.0)


def test_text_of_the_sdk_is_transformers_text(built, server, one_attempt):
    create = server.openai.audio.transcriptions.create
    found = [create(model=MODEL, file=file(seed), language="en") for seed in (1, 2)]
    assert [one.text for one in found] == [reference(built[0], server, seed) for seed in (1, 2)]
    assert found[0].text != found[1].text
    assert found[0].usage.type == "duration" and found[0].usage.seconds == 2


def test_translations(built, server, one_attempt):
    found = server.openai.audio.translations.create(model=MODEL, file=file(3))
    (code,) = {
        server.openai.audio.transcriptions.create(model=MODEL, file=file(3), response_format="verbose_json").language
    } & {"english", "german", "french"}
    language = {"english": "en", "german": "de", "french": "fr"}[code]
    assert found.text == reference(built[0], server, 3, "translate", language)


def test_language_is_detected_as_transformers_does(built, server, one_attempt):
    ids = {
        built[0].generation_config.lang_to_id[f"<|{code}|>"]: name
        for code, name in (("en", "english"), ("de", "german"), ("fr", "french"))
    }
    for seed in range(1, 6):
        answer = server.openai.audio.transcriptions.create(model=MODEL, file=file(seed), response_format="verbose_json")
        (expected,) = built[0].detect_language(heard(seed)).tolist()
        assert answer.language == ids[expected]


def test_formats(server, one_attempt):
    def post(**fields):
        return server.http.post("/v1/audio/transcriptions", files={"file": file(1)}, data={"language": "en"} | fields)

    as_json, text = post().json(), post(response_format="text")
    assert text.text == as_json["text"] + "\n" and text.headers["content-type"].startswith("text/plain")
    verbose = post(response_format="verbose_json").json()
    assert set(verbose) == {"task", "language", "duration", "text", "segments", "usage"}
    assert verbose["duration"] == 2.0 and verbose["language"] == "english" and verbose["task"] == "transcribe"
    segments = verbose["segments"]
    assert segments and [one["id"] for one in segments] == list(range(len(segments)))
    assert all(0 <= one["start"] <= one["end"] <= 2.0 for one in segments)
    srt, vtt = post(response_format="srt").text, post(response_format="vtt").text
    assert srt.startswith("1\n00:00:0") and srt.count(" --> ") == len(segments) == vtt.count(" --> ")
    assert vtt.startswith("WEBVTT\n\n00:00:0") and "," not in vtt.splitlines()[2].split(" --> ")[0]


def test_times_of_words(built, server, one_attempt):
    """They are those of `WhisperForConditionalGeneration.generate` with `return_token_timestamps`. It has no attention
    of a last token without a successor, which a random model's output has, so its tokens are computed once more.
    """
    model, tokenizer = built[0], server.state.tokenizer
    from transformers.generation.utils import GenerateEncoderDecoderOutput

    begin, end = token_id(model, "notimestamps") + 1, token_id(model, "endofspeech")
    model.set_attn_implementation("eager")
    num_words = 0
    for seed in range(1, 5):
        answer = server.openai.audio.transcriptions.create(
            model=MODEL,
            file=file(seed),
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        start = [token_id(model, name) for name in ("startoftranscript", "en", "transcribe")]
        out = model.generate(heard(seed), language="en", return_timestamps=True, force_unique_generate_call=True)
        ids = [*start, *(token for token in out[0].tolist() if token not in (*start, end))]
        with torch.inference_mode():
            forward = model(heard(seed), decoder_input_ids=torch.tensor([ids]), output_attentions=True)
        output = GenerateEncoderDecoderOutput(
            sequences=torch.tensor([ids]), cross_attentions=(forward.cross_attentions,)
        )
        (times,) = model._extract_token_timestamps(
            output, model.generation_config.alignment_heads, num_frames=200, num_input_ids=3
        ).tolist()
        expected = []
        for is_text, group in itertools.groupby(range(len(ids)), [one < end for one in ids].__getitem__):
            kept = list(group)
            first = kept[0]
            for one in split_words([ids[i] for i in kept], tokenizer.decode, True) if is_text else ():
                expected.append((one.text.strip(), times[first + one.first - 1], times[first + one.last - 1]))
        assert any(token >= begin for token in ids)
        num_words += len(expected)
        assert [one.word for one in answer.words] == [text for text, *_ in expected]
        for one, (_, start, last) in zip(answer.words, expected):
            assert (one.start, one.end) == pytest.approx((start, last), abs=0.011)
        assert "".join(one.word for one in answer.words) == "".join(answer.text.split())
        assert answer.segments
    assert num_words > 6


def test_words_without_segments(server, one_attempt):
    found = server.openai.audio.transcriptions.create(
        model=MODEL, file=file(2, 65.0), response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert found.words and found.segments is None
    times = [time for one in found.words for time in (one.start, one.end)]
    assert times == sorted(times) and times[-1] <= 65.0 and times[-1] > 30.0


def test_stream_is_the_whole_text(server, one_attempt):
    def create(**fields):
        return server.openai.audio.transcriptions.create(
            model=MODEL, file=file(4, 75.0), language="en", include=["logprobs"], **fields
        )

    whole, events = create(), list(create(stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) > 3
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text
    assert len(events[-1].logprobs) == len(whole.logprobs) == sum(len(event.logprobs) for event in events[:-1])
    usage = events[-1].usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_token_details.audio_tokens == 75 * 50


def test_long_audio_is_the_sum_of_its_pieces(server, one_attempt):
    silence = np.zeros(16_000, np.float32)
    parts = [sound(5, 20.0), silence, sound(6, 20.0), silence, sound(7, 20.0)]
    answer = server.http.post(
        "/v1/audio/transcriptions",
        files={"file": ("long.wav", wav(np.concatenate(parts)))},
        data={"language": "en", "response_format": "verbose_json"},
    ).json()
    assert answer["duration"] == 62.0
    starts = [one["seek"] for one in answer["segments"]]
    assert sorted(set(starts)) == [0, 2050, 4150]
    times = [one["start"] for one in answer["segments"]]
    assert times == sorted(times)
    assert answer["text"] == " ".join(
        text.strip()
        for text in [
            "".join(one["text"] for one in answer["segments"] if one["seek"] == start) for start in (0, 2050, 4150)
        ]
    )


def test_silence_has_no_text(server):
    data = {"response_format": "verbose_json"}
    silence = wav(np.zeros(16_000 * 95, np.float32))
    answer = server.http.post("/v1/audio/transcriptions", files={"file": ("s.wav", silence)}, data=data).json()
    assert answer["text"] == "" and answer["segments"] == [] and answer["duration"] == 95.0


def test_previous_text_changes_the_answer(server, one_attempt):
    def ask(**fields):
        data = {"language": "en"} | fields
        answer = server.http.post("/v1/audio/transcriptions", files={"file": file(8, 45.0)}, data=data)
        assert answer.status_code == 200, answer.text
        return answer.json()["text"]

    plain = ask()
    assert ask() == plain, "the same audio has the same text"
    assert ask(prompt="once upon a time " * 100) != plain
    assert ask(condition_on_previous_text="true") != plain


BAD = [
    ({"response_format": "xml"}, 400, "response_format", "must be one of json, text, srt, vtt, verbose_json"),
    ({"language": "xx"}, 400, "language", "is not one of this model's: de, en, fr"),
    ({"temperature": "1.5"}, 400, "temperature", "between 0 and 1"),
    ({"temperature": "warm"}, 400, "temperature", "must be a number"),
    ({"stream": "maybe"}, 400, "stream", "true or false"),
    ({"stream": "true", "response_format": "srt"}, 400, "stream", "json or text"),
    ({"include[]": "items"}, 400, "include", "must be one of logprobs"),
    ({"include[]": "logprobs", "response_format": "text"}, 400, "include", "needs response_format json"),
    ({"timestamp_granularities[]": "word", "response_format": "json"}, 400, "timestamp_granularities", "verbose_json"),
    ({"timestamp_granularities[]": "page", "response_format": "verbose_json"}, 400, "timestamp_granularities", "word"),
    ({"chunking_strategy": "often"}, 400, "chunking_strategy", "must be auto"),
    ({"chunking_strategy": '{"type": "server_vad", "depth": 1}'}, 400, "chunking_strategy", "has no 'depth'"),
    ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"}, 400, "chunking_strategy.threshold",
     "between 0 and 1"),
    ({"prompt": "<|notimestamps|>"}, 400, "prompt", "special tokens"),
    ({"known_speaker_names[]": "Ann"}, 400, "known_speaker_names", "tell speakers apart"),
    ({"model": "other"}, 404, "model", "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param", "message"), BAD)
def test_refused_fields(server, fields, status, param, message):
    answer = server.http.post("/v1/audio/transcriptions", files={"file": file()}, data=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and message in error["message"]


REPORTED = {  # what other servers failed at: (file, fields)
    "a tenth of a second (speaches)": (file(1, 0.1), {}),
    "ten milliseconds": (file(1, 0.01), {"timestamp_granularities[]": "word"}),
    "an odd name (LocalAI)": (("Sprachnotiz - \u97f3\u58f0.", file(1)[1]), {}),
    "a placeholder for the size (speaches 665)": (("a.wav", placeholder(file(1)[1])), {}),
    "a region (obsidian-scribe 27)": (file(1), {"language": "en-US"}),
    "auto": (file(1), {"language": "auto"}),
    "a name (OpenGateLLM 807)": (file(1), {"language": "english"}),
    "empty fields": (file(1), {"language": "", "prompt": "", "temperature": "", "chunking_strategy": "auto"}),
    "a long prompt (vLLM)": (file(1), {"prompt": "the bridge and the river " * 400}),
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported_elsewhere(server, one_attempt, name):
    upload, fields = REPORTED[name]
    fields = {"language": "en", "response_format": "verbose_json"} | fields
    answer = server.http.post("/v1/audio/transcriptions", files={"file": upload}, data=fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert {"task", "language", "duration", "text"} < set(found)  # LocalAI 5327
    seconds = found["duration"]
    times = [*found.get("words", ()), *found.get("segments", ())]
    assert times and all(0 <= one["start"] <= one["end"] <= seconds + 0.011 for one in times)


def test_chunking_strategy_of_the_sdk(server, one_attempt):
    answer = server.openai.audio.transcriptions.create(
        model=MODEL,
        file=file(),
        language="en",
        chunking_strategy={"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 300},
    )
    assert answer.text


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it is empty"), (b"some text", "container is not known"), (wav(sound(1))[:30], "header is damaged")],
)
def test_refused_files(server, content, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.openai.audio.transcriptions.create(model=MODEL, file=("a.wav", content))
    assert caught.value.param == "file"


def test_refused_forms(server, monkeypatch):
    post = server.http.post
    assert post("/v1/audio/transcriptions", content=b"x", headers={"Content-Type": "audio/wav"}).status_code == 415
    missing = post("/v1/audio/transcriptions", files={"other": file()})
    assert (missing.status_code, missing.json()["error"]["code"]) == (400, "missing_required_parameter")
    page = post("/v1/audio/transcriptions", files={"file": file()}, headers={"Origin": "http://elsewhere"})
    assert page.status_code == 415
    elsewhere = {"Origin": "http://elsewhere", "Sec-Fetch-Site": "cross-site"}
    assert post("/v1/audio/transcriptions", files={"file": file()}, headers=elsewhere).status_code == 415
    site = {"Origin": "http://elsewhere", "Sec-Fetch-Site": "same-site"}
    assert post("/v1/audio/transcriptions", files={"file": file()}, headers=site).status_code == 415


def test_the_page_of_this_server_and_the_ai_sdk(server, one_attempt):
    """The page's microphone sends no header of its own; the AI SDK asks for segments with response_format json."""
    headers = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    data = {"language": "en", "timestamp_granularities[]": "segment", "response_format": "json"}
    answer = server.http.post("/v1/audio/transcriptions", files={"file": file()}, data=data, headers=headers)
    assert answer.status_code == 200 and "segments" not in answer.json()


def test_refused_sizes(server, monkeypatch):
    post = server.http.post
    monkeypatch.setattr(server.state.speech, "max_bytes", 1000)
    large = post("/v1/audio/transcriptions", files={"file": file()})
    assert large.status_code == 413 and "1000 bytes" in large.json()["error"]["message"]
    monkeypatch.setattr(server.state.speech, "max_bytes", 1 << 30)
    monkeypatch.setattr(server.state.speech, "max_seconds", 1.5)
    long = post("/v1/audio/transcriptions", files={"file": file()})
    assert long.status_code == 400 and "it has 2 seconds" in long.json()["error"]["message"]


def data_url(seed: int = 1) -> str:
    return "data:audio/wav;base64," + base64.b64encode(file(seed)[1]).decode()


def test_a_body_of_json(server, one_attempt):
    """It is the form: lists, numbers and flags as JSON has them."""

    def both(body, **form):
        by_json = server.http.post("/v1/audio/transcriptions", json={"language": "en"} | body)
        by_form = server.http.post("/v1/audio/transcriptions", files={"file": file(3)}, data={"language": "en"} | form)
        assert by_json.status_code == by_form.status_code == 200, by_json.text
        return by_json, by_form

    first, second = both({"file_url": data_url(3), "prompt": None, "stream": False, "temperature": 0})
    assert first.json() == second.json() and first.json()["text"]
    options = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    first, second = both({"url": data_url(3)} | options, **options)
    assert first.json() == second.json() and first.json()["words"]
    vad = {"type": "server_vad", "threshold": 0.4}
    first, second = both(
        {"url": data_url(3), "chunking_strategy": vad, "response_format": "srt"},
        chunking_strategy=json.dumps(vad),
        response_format="srt",
    )
    assert first.text == second.text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"[1]", None, "not a JSON object"),
        (b"{}", "file_url", "Missing required parameter"),
        (b'{"file": "a"}', "file", "send file_url"),
        (b'{"file_url": 3}', "file_url", "must be a data: URL"),
        (b'{"url": "https://a/b.wav"}', "url", "must be a data: URL"),
        (b'{"file_url": "data:text/plain;base64,YQ=="}', "file_url", "holds text/plain, not audio or a video"),
        (b'{"file_url": "data:audio/wav;base64,?"}', "file_url", "not valid base64"),
        (b'{"file_url": "data:audio/wav;base64,YQ=="}', "file", "container is not known"),
    ],
)
def test_refused_bodies(server, body, param, message):
    answer = server.http.post("/v1/audio/transcriptions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"]


def test_a_batch(server, one_attempt):
    url = "/v1/audio/transcriptions"
    bodies = {
        "a": {"file_url": data_url(1), "language": "en"},
        "b": {"file_url": data_url(2), "language": "en", "response_format": "text"},
        "c": {"file_url": "data:audio/wav;base64,YQ=="},
        "d": {"file_url": data_url(1), "stream": True},
    }
    lines = [{"custom_id": key, "method": "POST", "url": url, "body": body} for key, body in bodies.items()]
    client = server.openai
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=url, completion_window="24h")
    poll(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
    batch = client.batches.retrieve(batch.id)
    found = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        for text in client.files.content(file_id).text.splitlines():
            one = json.loads(text)
            found[one["custom_id"]] = (one["response"]["status_code"], one["response"]["body"])
    as_json, as_text = (
        client.audio.transcriptions.create(model=MODEL, file=file(seed), language="en").text for seed in (1, 2)
    )
    assert found["a"][1]["text"] == as_json and found["b"] == (200, as_text + "\n")
    assert found["c"][0] == found["d"][0] == 400


def test_other_endpoints_say_what_the_model_does(server):
    for create in (
        lambda: server.openai.completions.create(model=MODEL, prompt="hi"),
        lambda: server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(openai.BadRequestError):
            create()
    with pytest.raises(openai.BadRequestError, match="transcribes audio; it serves: /v1/audio/transcriptions"):
        server.openai.completions.create(model=MODEL, prompt="hi")


def test_uploads_that_are_aborted_leave_nothing(server):
    async def run():
        client = server.aopenai()
        tasks = [
            asyncio.create_task(client.audio.transcriptions.create(model=MODEL, file=file(seed, 100.0)))
            for seed in range(16)
        ]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.02 * (number % 5))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()

    asyncio.run(run())
    store = server.state.speech._store
    poll(lambda: server.state.num_in_flight == 0 and server.state.client.num_open == 0)
    poll(lambda: store.num_bytes == 0)
    assert server.openai.audio.transcriptions.create(model=MODEL, file=file(), language="en").text is not None


def test_async_sdk_at_once(built, server, one_attempt):
    async def run():
        client = server.aopenai()
        found = await asyncio.gather(
            *(client.audio.transcriptions.create(model=MODEL, file=file(seed), language="en") for seed in range(1, 7))
        )
        await client.close()
        return [one.text for one in found]

    assert asyncio.run(run()) == [reference(built[0], server, seed) for seed in range(1, 7)]


def test_a_model_of_english(tmp_path, one_attempt):
    model = build_whisper(tmp_path, POSITIONS, multilingual=False, **SHORT)
    with running_server(str(tmp_path), **SETTINGS) as running:
        running.wait_ready(120)
        create = running.openai.audio.transcriptions.create
        out = model.generate(heard(1), max_length=48, num_beams=1)[0].tolist()
        end = token_id(model, "endofspeech")
        text = running.state.tokenizer.decode([token for token in out if token < end]).strip()
        assert create(model=MODEL, file=file(), language="en").text == create(model=MODEL, file=file()).text == text
        assert create(model=MODEL, file=file(), response_format="verbose_json").segments
        with pytest.raises(openai.BadRequestError, match="is not one of this model's: en"):
            create(model=MODEL, file=file(), language="de")
        with pytest.raises(openai.BadRequestError, match="translates nothing"):
            running.openai.audio.translations.create(model=MODEL, file=file())


def test_a_model_without_alignment_heads(built, tmp_path):
    shutil.copytree(built[1], tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    del settings["alignment_heads"]
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with running_server(str(tmp_path), **SETTINGS) as running:
        running.wait_ready(120)
        with pytest.raises(openai.BadRequestError, match="has no timestamps of words") as caught:
            running.openai.audio.transcriptions.create(
                model=MODEL, file=file(), response_format="verbose_json", timestamp_granularities=["word"]
            )
        assert caught.value.param == "timestamp_granularities"


def test_a_model_of_text_transcribes_nothing(model_folder):
    with running_server(model_folder) as running:
        running.wait_ready()
        with pytest.raises(openai.BadRequestError, match="The model transcribes no audio: its architecture reads no"):
            running.openai.audio.transcriptions.create(model=MODEL, file=io.BytesIO(file()[1]))
        assert json.loads(running.http.post("/v1/audio/speech", json={}).text)["error"]
