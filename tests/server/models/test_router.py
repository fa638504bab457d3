"""The routes that belong to no single model, and bodies that choose one."""

from __future__ import annotations

import pytest

from quire.server.errors import BadRequest
from quire.server.models.router import _of_form, _read, is_wide
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


def test_the_model_of_a_form():
    form = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    assert _of_form(form % (b"file", b"RIFF" * 10**5) + form % (b"model", b"whisper") + b"--x--") == "whisper"
    assert _of_form(form % (b"model", b"whisper") + form % (b"file", b"RIFF" * 10**5) + b"--x--") == "whisper"
    assert _of_form(form % (b"other", b"x")) is None
