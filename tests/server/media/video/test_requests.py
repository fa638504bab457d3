"""Videos in requests, with the fake executor: Qwen2.5-VL's processor, which makes 4 tokens of each pair of frames."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import AddedToken

from quire.server.prompt.images import split_at
from tests.helpers.models.checkpoints import VOCAB_SIZE, _byte_level
from tests.helpers.models.films import film
from tests.helpers.server.asking import is_error
from tests.helpers.server.running import RunningServer, running_server
from tests.server.media.conftest import asks, image_part, picture, text_part

CHAT = "/v1/chat/completions"
IMAGE_ID, VIDEO_ID = 500, 501
TEMPLATE = (
    "{%- for message in messages %}{{- message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '[<|image_pad|>]' }}"
    "{%- elif part['type'] == 'video' %}{{- '[<|video_pad|>]' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '\\n' }}{%- endfor %}"
)
needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs av (the extra `video`)")


def write_model(folder: Path) -> str:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}_pad|>", special=True) for name in ("image", "video")])
    assert tokenizer.token_to_id("<|video_pad|>") == VIDEO_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "model_max_length": 2048, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vision = {"patch_size": 4, "spatial_merge_size": 2, "tokens_per_second": 2}
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": vision}
    config["vocab_size"] = VOCAB_SIZE
    (folder / "config.json").write_text(json.dumps(config))
    limits = {"min_pixels": 64, "max_pixels": 64 * 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits | {"patch_size": 4}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(limits | {"patch_size": 4, "fps": 2}))
    return str(folder)


@pytest.fixture(scope="module")
def video_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def watching(tmp_path_factory, video_root) -> Iterator[RunningServer]:
    folder = write_model(tmp_path_factory.mktemp("watching"))
    settings = {
        "limit_mm_per_prompt": '{"image": 2, "video": 2}',
        "allowed_local_media_path": str(video_root),
        "max_video_bytes": 1 << 20,
    }
    fake = f"images={IMAGE_ID}/{VIDEO_ID}:4096:1024"
    with running_server(folder, fake=fake, max_model_len="512", **settings) as running:
        yield running.wait_ready()


@pytest.fixture
def sent(watching, monkeypatch) -> list:
    requests, generate = [], watching.state.client.generate
    monkeypatch.setattr(watching.state.client, "generate", lambda one: requests.append(one) or generate(one))
    return requests


def jpegs(*colors: str) -> str:
    frames = ",".join(base64.b64encode(picture(color, (16, 16))).decode() for color in colors)
    return f"data:video/jpeg;base64,{frames}"


def video_part(url: str | None = None, **fields) -> dict:
    return {"type": "video_url", "video_url": {"url": url or jpegs("red", "green", "blue")}, **fields}


def mp4(**options) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(film(**options)).decode()}"


def test_frames_sent_as_images(watching, sent):
    """An odd number: two pairs. Each is an item of 4 tokens, and the second is later on the axis of time."""
    answer = watching.http.post(CHAT, json=asks(text_part("a"), video_part(), text_part("b")))
    assert answer.status_code == 200, answer.text
    (request,) = sent
    assert [item.num_embeds for item in request.media] == [4, 4]
    first, second = request.media
    assert second.offset == first.offset + 4 and (first.time, second.time) == (None, 2)  # a second at 2 frames a second
    assert request.prompt_token_ids.count(VIDEO_ID) == 8 and first.key != second.key
    assert load_file(first.path)["pixel_values"].shape == (16, 3, 2, 16)
    usage = answer.json()["usage"]["prompt_tokens_details"]
    assert usage["video_tokens"] == 8 and "image_tokens" not in usage


def test_images_and_videos_keep_their_order(watching, sent):
    parts = [video_part(), text_part("x"), image_part("red"), video_part(jpegs("red", "red")), text_part("y")]
    answer = watching.http.post(CHAT, json=asks(*parts))
    assert answer.status_code == 200, answer.text
    (request,) = sent
    ids = request.prompt_token_ids
    assert [ids[item.offset] for item in request.media] == [VIDEO_ID, VIDEO_ID, IMAGE_ID, VIDEO_ID]
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["video_tokens"] == 12 and details["image_tokens"] > 0


@needs_av
def test_a_file(watching, sent, video_root):
    """12 frames at 4 a second: 6 frames at 2 a second, 3 pairs. By a data URL, a file and at the routes that count."""
    body = asks(text_part("a"), video_part(mp4()))
    answer = watching.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert [item.time for item in sent[0].media] == [None, 2, 4]
    (video_root / "a.mp4").write_bytes(film())
    again = watching.http.post(CHAT, json=asks(text_part("a"), video_part("file:///" + str(video_root / "a.mp4"))))
    assert again.status_code == 200 and [one.key for one in sent[1].media] == [one.key for one in sent[0].media]
    tokens = watching.http.post("/tokenize", json=body).json()
    assert tokens["count"] == answer.json()["usage"]["prompt_tokens"] and tokens["tokens"].count(VIDEO_ID) == 6
    fewer = watching.http.post(CHAT, json=body | {"mm_processor_kwargs": {"num_frames": 2}})
    assert fewer.json()["usage"]["prompt_tokens_details"]["video_tokens"] == 2


@needs_av
def test_frames_that_a_request_chooses(watching, sent):
    """vLLM's media_io_kwargs: of 12 frames in 3 seconds; the fewer of both count, and -1 is the default."""
    body = asks(text_part("a"), video_part(mp4()))
    for chosen, pairs in (
        ({"num_frames": 2}, 1),
        ({"fps": 1.4}, 2),
        ({"num_frames": 4, "fps": 2}, 2),
        ({"num_frames": -1, "fps": -1}, 3),
        ({}, 3),
    ):
        answer = watching.http.post(CHAT, json=body | {"media_io_kwargs": {"video": chosen, "image": {}}})
        assert answer.status_code == 200, answer.text
        assert len(sent[-1].media) == pairs, chosen
    both = {"media_io_kwargs": {"video": {"num_frames": 2}}, "mm_processor_kwargs": {"num_frames": 4}}
    assert watching.http.post(CHAT, json=body | both).status_code == 200 and len(sent[-1].media) == 2
    tokens = watching.http.post("/tokenize", json=body | {"media_io_kwargs": {"video": {"num_frames": 2}}}).json()
    assert tokens["tokens"].count(VIDEO_ID) == 2


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"video": {"num_frames": 1 << 20}}, "media_io_kwargs.video.num_frames"),
        ({"video": {"fps": "fast"}}, "media_io_kwargs.video.fps"),
        ({"image": {"mode": "L"}}, "media_io_kwargs.image"),
        ([], "media_io_kwargs"),
    ],
)
def test_refused_choices_of_frames(watching, given, param):
    answer = watching.http.post(CHAT, json=asks(video_part(), media_io_kwargs=given))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_rendered_request(watching):
    body = asks(video_part(), image_part("red"))
    answer = watching.http.post("/v1/chat/completions/render", json=body).json()
    places = answer["features"]["mm_placeholders"]
    assert [place["length"] for place in places["video"]] == [4, 4] and len(places["image"]) == 1
    assert answer["token_ids"].count(VIDEO_ID) == 8 and len(answer["features"]["mm_hashes"]["video"]) == 2


def test_a_uuid_stands_for_a_video(watching, sent):
    assert watching.http.post(CHAT, json=asks(video_part(uuid="clip"))).status_code == 200
    assert watching.http.post(CHAT, json=asks({"type": "video_url", "uuid": "clip"})).status_code == 200
    assert [one.key for one in sent[0].media] == [one.key for one in sent[1].media]
    unknown = watching.http.post(CHAT, json=asks({"type": "image_url", "uuid": "clip"}))  # a name of another kind
    assert is_error(unknown, 400, None, "messages.0.content.0.image_url")


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        ({"type": "video_url"}, "messages.0.content.0.video_url", "Missing"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,"}}, None, "FRAME,FRAME"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}, None, "not an image"),
        ({"type": "video_url", "video_url": {"url": "data:text/plain;base64,AAAA"}}, None, "not a video"),
        ({"type": "video_url", "video_url": {"url": "http://a.example/a.mp4"}}, None, "--allowed-media-domains"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, None, "no such file"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + "A" * (2 << 20)}}, None, "max-video"),
        ({"type": "video_url", "video_url": {"url": "data:"}, "video": "x"}, "messages.0.content.0.video", ""),
        ({"type": "input_video", "video_url": "x"}, "messages.0.content.0.type", "video_url"),
    ],
)
def test_refused_parts(watching, part, param, says):
    answer = watching.http.post(CHAT, json=asks(part))
    assert answer.status_code == 400 and says in answer.text, answer.text
    assert answer.json()["error"]["param"] == (param or "messages.0.content.0.video_url")


def test_limits_of_a_prompt(watching):
    three = watching.http.post(CHAT, json=asks(*[video_part()] * 3))
    assert is_error(three, 400, None, "messages") and "3 videos, and this server's limit is 2" in three.text
    long = watching.http.post(CHAT, json=asks(video_part(jpegs(*["red"] * 300))))
    assert is_error(long, 400, "context_length_exceeded", "messages") and "1 videos that take 600 tokens" in long.text
    options = {"max_pixels": 64 * 4000, "min_pixels": 64 * 3000}
    larger = watching.http.post(CHAT, json=asks(video_part(), mm_processor_kwargs=options))
    assert is_error(larger, 400, None, "mm_processor_kwargs") and "may only make videos smaller" in larger.text


def test_placeholders_of_clients_are_text(watching, sent):
    """Tokens of both kinds in a client's text, next to a video."""
    before, after = text_part("<|video_pad|> or <|image_pad|>"), text_part("[<|video_pad|>]")
    answer = watching.http.post(CHAT, json=asks(before, video_part(), after))
    assert answer.status_code == 200, answer.text
    (request,) = sent
    assert request.prompt_token_ids.count(VIDEO_ID) == 8 + 2 and len(request.media) == 2
    assert request.media[0].offset > request.prompt_token_ids.index(IMAGE_ID)


def test_other_dialects_refuse_them(watching):
    item = {"role": "user", "content": [{"type": "input_video", "video_url": jpegs("red")}]}
    answer = watching.http.post("/v1/responses", json={"input": [item]})
    assert answer.status_code == 400 and "input_video" in answer.text
    block = {"type": "video", "source": {"type": "base64", "data": "AAAA", "media_type": "video/mp4"}}
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}
    answer = watching.http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and "video" in answer.text


def test_facts(watching):
    images = watching.http.get("/server_info").json()["images"]
    assert images["video"]["accepted"] and images["video"]["max_per_prompt"] == 2
    assert "fps" in images["video"]["mm_processor_kwargs"]


def test_a_model_of_images_alone(seeing):
    answer = seeing.http.post(CHAT, json=asks(video_part()))
    assert is_error(answer, 400, "unsupported_parameter", "messages.0.content.0.video_url")
    assert "takes no videos: its architecture (LlavaForConditionalGeneration) reads images only" in answer.text


def test_split_at():
    kinds = {"image": "<i>", "video": "<s><v><e>"}
    assert split_at("a<i>b<s><v><e><v>c", kinds) == (["a", "b", "<v>c"], ["image", "video"])
