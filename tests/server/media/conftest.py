"""A model that reads images, with the fake executor: Llava's processor, which makes 16 tokens of each image."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import AddedToken

from tests.helpers.models.checkpoints import VOCAB_SIZE, _byte_level
from tests.helpers.server.running import RunningServer, running_server

NUM_TOKENS = 16  # of an image
IMAGE_ID = 500
FAKE = f"images={IMAGE_ID}:4096:1024"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<image>' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_seeing_model(folder: Path, template: str | None = TEMPLATE) -> str:
    tokenizer = _byte_level()
    assert tokenizer.add_special_tokens([AddedToken("<image>", special=True)]) == 1
    assert tokenizer.token_to_id("<image>") == IMAGE_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|begin_of_text|>", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings if template is None else settings | {"chat_template": template})
    )
    vision = {"image_size": 32, "patch_size": 8, "model_type": "siglip_vision_model"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": vision, "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    mean = [0.5, 0.5, 0.5]
    preprocessor = {"size": {"height": 32, "width": 32}, "image_mean": mean, "image_std": mean}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return str(folder)


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory) -> str:
    return write_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def media_root(tmp_path_factory) -> Path:
    """The folder of --allowed-local-media-path."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def seeing(seeing_folder, media_root) -> Iterator[RunningServer]:
    settings = {
        "limit_mm_per_prompt": '{"image": 4}',
        "allowed_local_media_path": str(media_root),
        "allowed_media_domains": ["images.example"],
        "api_key": ["none", "other"],
        "admin_api_key": ["admin"],
    }
    with running_server(seeing_folder, fake=FAKE, max_model_len="256", **settings) as running:
        running.http.headers["Authorization"] = "Bearer none"
        yield running.wait_ready()


@pytest.fixture
def sent(seeing, monkeypatch) -> list:
    """The requests that the engine gets."""
    requests, generate = [], seeing.state.client.generate

    def note(request):
        requests.append(request)
        return generate(request)

    monkeypatch.setattr(seeing.state.client, "generate", note)
    return requests


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def picture(color: str = "red", size: tuple[int, int] = (20, 10)) -> bytes:
    return encoded(Image.new("RGB", size, color))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(color: str = "red", **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(picture(color))}, **fields}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def asks(*parts: dict, **fields) -> dict:
    """A chat completion with one message of these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2, **fields}
