"""Images in `quire bench serve --dataset-name random-mm` and in `quire chat`."""

from __future__ import annotations

import argparse
import base64
import io
import random

import pytest
from PIL import Image

from quire.cli import main as cli
from quire.cli.bench import datasets, serve
from quire.cli.bench.images import buckets, number_range, random_image
from tests.helpers.server.fake_openai import FakeOpenAI

SMALL = "{(8, 16, 1): 1, (24, 8, 1): 3, (720, 1280, 16): 0}"


@pytest.fixture
def server():
    with FakeOpenAI() as server:
        yield server


def opened(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def arguments(**options) -> argparse.Namespace:
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return serve.parser().parse_args(["--dataset-name", "random-mm", "--random-mm-bucket-config", SMALL, *flags])


def test_random_images_have_the_asked_numbers_and_sizes():
    given = arguments(num_prompts=60, random_mm_base_items_per_request=2, random_mm_num_mm_items_range_ratio=0.5)
    made = datasets.make_samples(given, None, 0)
    assert made == datasets.make_samples(given, None, 0) and made != datasets.make_samples(given, None, 1)
    assert {len(sample.images) for sample in made} == {1, 2, 3}
    images = [opened(url) for sample in made for url in sample.images]
    assert {image.size for image in images} == {(16, 8), (8, 24)}
    tall = sum(image.size == (8, 24) for image in images) / len(images)
    assert 0.6 < tall < 0.9  # of 3 in 4
    assert len({url for sample in made for url in sample.images}) == len(images)
    for image in images:
        image.load()


@pytest.mark.parametrize(
    "base, ratio, limit, expected",
    [
        (1, 0, '{"image": 255, "video": 1}', (1, 1)),
        (3, 0.5, '{"image": 255}', (1, 5)),
        (3, 1, '{"image": 4}', (0, 4)),
        (0, 0, '{"image": 3}', (0, 0)),
        (2, 0, '{"image": 2, "video": 0}', (2, 2)),
    ],
)
def test_the_number_of_images_is_vllms(base, ratio, limit, expected):
    given = arguments(
        random_mm_base_items_per_request=base,
        random_mm_num_mm_items_range_ratio=ratio,
        random_mm_limit_mm_per_prompt=limit,
    )
    assert number_range(given) == expected


def test_sizes_are_normalized_and_may_be_json():
    assert buckets('{"(256, 256, 1)": 2, "(720, 1280, 1)": 6}') == {(256, 256): 2, (720, 1280): 6}
    default = serve.parser().parse_args([]).random_mm_bucket_config
    assert default == {(256, 256): 0.5, (720, 1280): 0.5}


def test_images_are_sent(server, capsys):
    flags = ["--dataset-name", "random-mm", "--random-mm-bucket-config", SMALL, "--random-mm-base-items-per-request"]
    flags += ["2", "--num-prompts", "3", "--disable-tqdm", "--random-input-len", "4", "--random-output-len", "3"]
    assert cli.main(["bench", "serve", "--port", str(server.port), *flags]) == 0
    for request in server.requests:
        (message,) = request["messages"]
        text, *images = message["content"]
        assert text["type"] == "text" and len(text["text"].split()) == 4
        assert [part["type"] for part in images] == ["image_url"] * 2
        opened(images[0]["image_url"]["url"]).load()
    assert len(server.requests) == 4  # with the test of the server
    assert "random-mm" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--endpoint", "/v1/completions"], "random-mm needs --endpoint /v1/chat/completions"),
        (["--random-mm-bucket-config", "{(8, 8, 16): 1}"], "only images, of one frame"),
        (["--random-mm-bucket-config", "{(0, 8, 1): 1}"], "sides of 1 to"),
        (["--random-mm-bucket-config", "{(8, 8, 1): -1}"], "at least 0, got -1"),
        (["--random-mm-bucket-config", "{(8, 8, 1): 0}"], "no size has a probability"),
        (["--random-mm-bucket-config", "{(8, 8): 1}"], "is not (height, width"),
        (["--random-mm-bucket-config", "os.abort()"], "not a value of Python"),
        (["--random-mm-limit-mm-per-prompt", '{"images": 1}'], "is not one of image"),
        (["--random-mm-limit-mm-per-prompt", '{"image": 0}'], "asks for at least 1 images"),
        (["--random-mm-num-mm-items-range-ratio", "2"], "between 0 and 1"),
    ],
)
def test_wrong_flags_are_named(server, flags, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--port", str(server.port), "--dataset-name", "random-mm", *flags])
    assert message in capsys.readouterr().err


def test_an_image_of_the_asked_size():
    image = opened(random_image(random.Random(0), 30, 50))
    assert (image.size, image.format) == ((50, 30), "JPEG")


# ---- quire chat


@pytest.fixture
def picture(tmp_path) -> str:
    path = tmp_path / "a page.png"
    Image.new("RGB", (3, 4), "red").save(path)
    return str(path)


def data_url(path: str) -> str:
    with open(path, "rb") as file:
        return f"data:image/png;base64,{base64.b64encode(file.read()).decode()}"


def test_chat_sends_the_image_of_a_quick_message(server, picture, capsys):
    flags = ["--url", server.url, "--image", picture, "--image", picture, "-q", "what is it?"]
    assert cli.main(["chat", *flags]) == 0
    (message,) = server.requests[-1]["messages"]
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    assert message["content"] == [image, image, {"type": "text", "text": "what is it?"}]
    assert cli.main(["chat", "--url", server.url, "--image", "/nowhere.png", "-q", "x"]) == 1
    assert "/nowhere.png: No such file" in capsys.readouterr().err


def test_an_image_belongs_to_the_next_message(server, picture, capsys, monkeypatch):
    lines = iter(
        [f"/image {picture}", "what is it?", "/image /nowhere.png", "sure?", f"/image {picture}", "/reset", "x"]
    )
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines, None) or (_ for _ in ()).throw(EOFError))
    assert cli.main(["chat", "--url", server.url]) == 0
    contents = [request["messages"][-1]["content"] for request in server.requests]
    assert contents[0][0]["image_url"]["url"] == data_url(picture) and contents[0][1]["text"] == "what is it?"
    assert contents[1:] == ["sure?", "x"]
    assert isinstance(server.requests[1]["messages"][0]["content"], list)  # the image stays in the conversation
    shown = capsys.readouterr().err
    assert "images of the next message: 1" in shown and "error: /nowhere.png" in shown
