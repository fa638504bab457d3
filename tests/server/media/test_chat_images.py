"""Images in chat completions: what the engine gets, what the client is told, and what is refused."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.server.asking import CHAT, is_error
from tests.helpers.server.running import MODEL, poll
from tests.server.media.conftest import (
    IMAGE_ID,
    NUM_TOKENS,
    asks,
    data_url,
    image_part,
    picture,
    text_part,
)


def test_images_keep_their_place(seeing, sent):
    answer = seeing.http.post(CHAT, json=asks(text_part("a"), image_part("red"), text_part("b"), image_part("blue")))
    assert answer.status_code == 200, answer.text
    (request,) = sent
    tokenizer = seeing.state.tokenizer
    text = "<|im_start|>user\na" + NUM_TOKENS * "<image>" + "b" + NUM_TOKENS * "<image>" + "<|im_end|>\n"
    assert request.prompt_token_ids == tokenizer.encode(text + "<|im_start|>assistant\n", False)
    first, second = request.media
    for item in request.media:
        assert item.length == item.num_embeds == NUM_TOKENS
        assert request.prompt_token_ids[item.offset : item.offset + item.length] == [IMAGE_ID] * NUM_TOKENS
        assert request.prompt_token_ids[item.offset - 1] != IMAGE_ID
    assert first.offset + first.length < second.offset and first.key != second.key
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == 2 * NUM_TOKENS


def test_features_are_those_of_the_image(seeing, sent):
    assert seeing.http.post(CHAT, json=asks(image_part("lime"))).status_code == 200
    (item,) = sent[0].media
    pixels = load_file(item.path)["pixel_values"]
    assert pixels.shape == (3, 32, 32)
    assert np.allclose(pixels[0], -1) and np.allclose(pixels[1], 1) and np.allclose(pixels[2], -1)
    folder = Path(item.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_same_image_is_preprocessed_once(seeing, sent):
    hits = seeing.state.images.num_hits
    for _ in range(3):
        assert seeing.http.post(CHAT, json=asks(image_part("navy"), image_part("navy"))).status_code == 200
    assert len({item.key for request in sent for item in request.media}) == 1
    assert seeing.state.images.num_hits - hits >= 4


def test_leases_end_with_the_answer(seeing, monkeypatch):
    store, generate = seeing.state.images._store, seeing.state.client.generate
    num_leases = []  # while the request is sent: its answer may be complete before a client reads its first chunk

    def note(request):
        num_leases.append(sum(entry.num_leases for entry in store._entries.values()))
        return generate(request)

    monkeypatch.setattr(seeing.state.client, "generate", note)
    assert seeing.http.post(CHAT, json=asks(image_part("olive"), stream=True)).status_code == 200
    assert num_leases == [1]
    gc.collect()
    poll(lambda: not sum(entry.num_leases for entry in store._entries.values()))


def test_a_uuid_stands_for_an_image(seeing, sent):
    assert seeing.http.post(CHAT, json=asks(image_part("pink", uuid="sunset"))).status_code == 200
    for part in (
        {"type": "image_url", "uuid": "sunset"},
        {"type": "image_url", "image_url": None, "uuid": "sunset"},
        {"type": "image_url", "image_url": {}, "uuid": "sunset"},
    ):
        assert seeing.http.post(CHAT, json=asks(part)).status_code == 200
    assert len({request.media[0].key for request in sent}) == 1
    unknown = seeing.http.post(CHAT, json=asks({"type": "image_url", "uuid": "dawn"}))
    assert is_error(unknown, 400, None, "messages.0.content.0.image_url") and "dawn" in unknown.text
    # another tenant's names are its own, and its content decides about its images
    key = {"Authorization": "Bearer other"}
    other = seeing.http.post(CHAT, json=asks({"type": "image_url", "uuid": "sunset"}), headers=key)
    assert is_error(other, 400, None, "messages.0.content.0.image_url")
    assert seeing.http.post(CHAT, json=asks(image_part("gray", uuid="sunset")), headers=key).status_code == 200
    assert sent[-1].media[0].key != sent[0].media[0].key
    assert seeing.http.post(CHAT, json=asks({"type": "image_url", "uuid": "sunset"})).status_code == 200
    assert sent[-1].media[0].key == sent[0].media[0].key


def test_literal_placeholders_are_text(seeing, sent):
    said = "what does <image> mean? <image>"
    answer = seeing.http.post(CHAT, json=asks(text_part(said), image_part(), text_part(said)))
    assert answer.status_code == 200, answer.text
    (request,) = sent
    (item,) = request.media
    tokenizer = seeing.state.tokenizer
    before = tokenizer.encode(f"<|im_start|>user\n{said}", False)
    assert request.prompt_token_ids[: item.offset] == before
    after = tokenizer.encode(f"{said}<|im_end|>\n<|im_start|>assistant\n", False)
    assert request.prompt_token_ids[item.offset + item.length :] == after
    assert (item.length, item.num_embeds) == (NUM_TOKENS, NUM_TOKENS)


def test_conversations_and_results_of_tools(seeing, sent):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [image_part("red"), text_part("first")]},
        {"role": "assistant", "content": "I see"},
        {"role": "user", "content": [text_part("second"), image_part("blue")]},
    ]
    assert seeing.http.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200
    results = [{"role": "tool", "tool_call_id": "c1", "content": [text_part("here"), image_part("green")]}]
    messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, *results]
    answer = seeing.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    if answer.status_code == 200:  # a template that prints calls
        assert len(sent[-1].media) == 3
    else:
        assert is_error(answer, 400, None, "messages") and "tool" in answer.text
    assert len(sent[0].media) == 2


def test_a_file_below_the_allowed_folder(seeing, sent, media_root, tmp_path):
    (media_root / "a b.png").write_bytes(picture("teal"))
    (tmp_path / "secret.png").write_bytes(picture("teal"))
    (media_root / "link.png").symlink_to(tmp_path / "secret.png")
    (media_root / "folder").mkdir(exist_ok=True)
    ask = lambda url: seeing.http.post(CHAT, json=asks({"type": "image_url", "image_url": {"url": url}}))  # noqa: E731
    assert ask(f"file://{media_root}/a%20b.png").status_code == 200
    assert ask(f"file://localhost{media_root}/folder/../a%20b.png").status_code == 200
    for url in (
        f"file://{tmp_path}/secret.png",
        f"file://{media_root}/../{tmp_path.name}/secret.png",
        f"file://{media_root}/link.png",
        f"file://{media_root}/folder",
        f"file://{media_root}/none.png",
        f"file://{media_root}",
        f"file://{media_root}/%00.png",
        "file:///dev/zero",
        f"file://elsewhere{media_root}/a%20b.png",
    ):
        answer = ask(url)
        assert is_error(answer, 400, None, "messages.0.content.0.image_url"), url
        assert str(tmp_path) not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "part, says",
    [
        ({"type": "image_url"}, "Missing required parameter"),
        ({"type": "image_url", "image_url": {}}, "Missing required parameter"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "known format"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "has not the form"),
        ({"type": "image_url", "image_url": {"url": "data:text/html;base64,YQ=="}}, "not an image"),
        ({"type": "image_url", "image_url": {"url": data_url(picture()[:45])}}, "cannot be decoded"),
        ({"type": "image_url", "image_url": {"url": "ftp://images.example/a.png"}}, "none of data:"),
        ({"type": "image_url", "image_url": {"url": "picture.png"}}, "none of data:"),
        ({"type": "image_url", "image_url": {"url": "http://elsewhere.example/"}}, "--allowed-media-domains"),
        ({"type": "image_url", "image_url": {"url": "http://u:p@images.example/"}}, "name or a password"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "medium"}}, "invalid enum value"),
    ],
)
def test_what_is_no_image(seeing, part, says):
    answer = seeing.http.post(CHAT, json=asks(text_part("see"), part))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"].startswith("messages.0.content.1")


def test_limits(seeing):
    many = seeing.http.post(CHAT, json=asks(*(image_part() for _ in range(5))))
    assert is_error(many, 400, None, "messages") and "limit is 4 (--limit-mm-per-prompt)" in many.text
    long = seeing.http.post(CHAT, json=asks(*(image_part() for _ in range(4)), text_part("word " * 190)))
    assert is_error(long, 400, "context_length_exceeded", "messages")
    assert "of which 4 images take 64" in long.json()["error"]["message"]
    cut = seeing.http.post(CHAT, json=asks(image_part(), truncate_prompt_tokens=20))
    assert is_error(cut, 400, None, "truncate_prompt_tokens")
    option = seeing.http.post(CHAT, json=asks(image_part(), mm_processor_kwargs={"max_pixels": 3}))
    assert is_error(option, 400, None, "mm_processor_kwargs") and "no option 'max_pixels'" in option.text


def test_prompts_are_counted_with_their_images(seeing):
    body = asks(text_part("a"), image_part()) | {"model": MODEL}
    used = seeing.http.post(CHAT, json=body).json()["usage"]["prompt_tokens"]
    tokenized = seeing.http.post("/tokenize", json={"messages": body["messages"]}).json()
    assert tokenized["count"] == used and tokenized["tokens"].count(IMAGE_ID) == NUM_TOKENS
    rendered = seeing.http.post(f"{CHAT}/render", json=body).json()
    assert rendered["count"] == used and rendered["prompt"].count("<image>") == 1
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    start, end = place["offset"], place["offset"] + place["length"]
    assert rendered["token_ids"][start:end] == [IMAGE_ID] * NUM_TOKENS
    (key,) = rendered["features"]["mm_hashes"]["image"]
    seeing.http.post(CHAT, json=body)
    assert key == seeing.http.post(f"{CHAT}/render", json=body).json()["features"]["mm_hashes"]["image"][0]


def test_choices_share_the_image(seeing, sent):
    answer = seeing.http.post(CHAT, json=asks(image_part(), n=3, temperature=1))
    assert len(answer.json()["choices"]) == 3
    (request,) = sent
    assert len(request.choices) == 3 and len(request.media) == 1
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS


def test_a_model_of_text_refuses_images(server):
    answer = server.http.post(CHAT, json=asks(image_part()))
    assert is_error(answer, 400, "unsupported_parameter", "messages.0.content.0.image_url")
    assert "takes no images" in answer.text
    answer = server.http.post(CHAT, json=asks(text_part("a"), mm_processor_kwargs={"max_pixels": 3}))
    assert is_error(answer, 400, "unsupported_parameter", "mm_processor_kwargs")


def value(server, name: str) -> float:
    lines = server.http.get("/metrics", headers={"Authorization": "Bearer admin"}).text.splitlines()
    (found,) = [line for line in lines if line.startswith(f"{name}{{")]
    return float(found.split()[-1])


def test_metrics_count_images(seeing):
    names = ["mm_cache_queries_total", "mm_cache_hits_total", "prompt_image_tokens_total", "encoder_embeddings_total"]
    names = [f"{prefix}:{name}" for prefix in ("quire", "vllm") for name in names]
    names.append("quire:image_preprocessing_seconds_count")
    before = [value(seeing, name) for name in names]
    for _ in range(2):
        assert seeing.http.post(CHAT, json=asks(image_part("gold"), image_part("salmon"), n=2)).status_code == 200
    # two images, preprocessed and encoded once
    expected = [4, 2, 4 * NUM_TOKENS, 2 * NUM_TOKENS] * 2 + [2]
    poll(lambda: [value(seeing, name) - old for name, old in zip(names, before, strict=True)] == expected)
    assert 0 < value(seeing, "quire:encoder_cache_usage_perc") <= 1
    preprocessing = value(seeing, "quire:image_preprocessing_seconds_sum")
    assert preprocessing > 0


def test_server_info_says_what_is_done_with_images(seeing, server):
    info = seeing.http.get("/server_info", headers={"Authorization": "Bearer admin"}).json()
    assert {"accepted": True, "max_per_prompt": 4, "placeholder": "<image>"}.items() <= info["images"].items()
    assert info["engine"]["media"]["image_token_id"] == IMAGE_ID
    images = server.http.get("/server_info").json()["images"]
    assert images["accepted"] is False and "reads text only" in images["reason"]


def test_bodies_count_until_their_images_are_loaded(seeing, monkeypatch):
    """Many that wait for images are refused as many that are being received are."""
    images, connections, go = seeing.state.images, seeing.launcher.frontend.connections, threading.Event()
    look = images._look
    monkeypatch.setattr(images, "_look", lambda *given, **named: (go.wait(10), look(*given, **named))[1])
    body = asks(image_part("plum"), text_part("word " * 20))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(seeing.http.post, CHAT, json=body)
        try:
            poll(lambda: images._num_waiting == 1)
            assert connections.body_bytes >= len(json.dumps(body)) - 50
        finally:
            go.set()
        assert answer.result().status_code == 200
    poll(lambda: connections.body_bytes == 0)
