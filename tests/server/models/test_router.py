"""The routes that belong to no single model, and bodies that choose one."""

from __future__ import annotations

import pytest

from quire.server.errors import BadRequest
from quire.server.models.router import _model_in_form, _read, is_wide
from quire.server.routes import ROUTES

# of one model, chosen by ?model=, and without it the first
BY_QUERY = {"/props", "/slots", "/slots/{slot_id}", "/lora-adapters", "/tokenizer_info"}
BY_QUERY |= {"/get_server_info", "/kv_event_sources", "/health_generate"}


def test_every_route_belongs_to_a_model_or_to_all():
    """A route of a model has a body that names it, or takes ?model=."""
    for route in ROUTES:
        if is_wide(route.path):
            assert not route.path.startswith("/v1/chat"), route.path
        elif route.method == "POST":
            continue
        else:
            assert route.path in BY_QUERY, f"{route.method} {route.path} belongs to no model: see `is_wide`"


WRONG = [b"{", b"[]", b"5", b'"text"', b'{"model": 5}', b'{"stream": "x"}', b"\xff", b"[" * 10**5]


@pytest.mark.parametrize("body", WRONG)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(BadRequest):
        _read(body)


PART = b'--x-\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = PART % (b"file", b"RIFF" * 10**5)
MODELS = {
    "requests": PART % (b"model", b"whisper"),
    "okhttp": b'--x-\r\nContent-Disposition: form-data; name="model"\r\nContent-Length: 7\r\n\r\nwhisper\r\n',
    "aiohttp": b"--x-\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n',
    "Java's": b"--x-\r\ncontent-disposition: form-data; charset=utf-8; name=model\r\n\r\nwhisper\r\n",
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("boundary", ["x-", '"x-"'])
def test_the_model_of_a_form(model, boundary):
    kind = f"multipart/form-data; boundary={boundary}"
    assert _model_in_form(FILE + model + b"--x---", kind) == "whisper"
    assert _model_in_form(model + FILE + b"--x---", kind) == "whisper"


def test_a_form_without_a_model():
    kind = "multipart/form-data; boundary=x-"
    assert _model_in_form(PART % (b"other", b"x"), kind) is None
    assert _model_in_form(PART % (b"file", MODELS["okhttp"].removeprefix(b"--x-")), kind) is None
    assert _model_in_form(FILE, "multipart/form-data") is None
