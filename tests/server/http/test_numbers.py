"""Integers that come as text: one reader, the same refusals wherever they come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.errors import BadRequest
from quire.server.http.numbers import bounded_int
from tests.helpers.server.running import RunningServer, make_config

WRONG = [
    "0" * 8 + "3600" + "9" * 30,
    "9" * 30,
    "9" * 5000,
    "-1",
    "+5",
    " 5",
    "5 ",
    "1.0",
    "1e3",
    "1_0",
    "²",
    "١",
    "",
    "-",
]


@given(st.integers(-(2**70), 2**70), st.integers(-(2**65), 2**65), st.integers(0, 2**65))
def test_integers_within_bounds_are_taken(value, low, width):
    if low <= value <= low + width:
        assert bounded_int(str(value), low, low + width, "x") == value
    else:
        with pytest.raises(BadRequest):
            bounded_int(str(value), low, low + width, "x")


@given(st.text(max_size=6))
def test_other_texts_are_refused(text):
    try:
        value = bounded_int(text, -100, 100, "x")
    except BadRequest as error:
        assert error.param == "x" and "-100" in error.message and "100" in error.message
    else:
        assert value == int(text) and text.isascii()


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    running = RunningServer(make_config(model_folder, batch_dir=str(tmp_path_factory.mktemp("b")))).wait_ready()
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize("text", WRONG)
def test_everywhere(server, text):
    client = server.http
    stored = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 16}).json()["id"]
    conversation = client.post("/v1/conversations", json={}).json()["id"]
    queries = [
        ("/v1/files", "limit"),
        ("/v1/batches", "limit"),
        ("/v1/messages/batches", "limit"),
        (f"/v1/responses/{stored}/input_items", "limit"),
        (f"/v1/conversations/{conversation}/items", "limit"),
    ]
    for path, name in queries:
        answer = client.get(path, params={name: text})
        assert answer.status_code == 400 and name in answer.text, (path, answer.text)
    answer = client.get(f"/v1/responses/{stored}", params={"stream": "true", "starting_after": text})
    assert answer.status_code == 400 and "starting_after" in answer.text
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": text}
    answer = client.post("/v1/files", data=form, files={"file": b"x"}, headers={"x-requested-with": "test"})
    assert answer.status_code == 400 and "expires_after[seconds]" in answer.text
    assert not list((server.state.batches.store.folder / "files").iterdir())
    if text.isascii() and text.strip() == text and text not in ("", "-1"):
        headers = {"x-vllm-priority": text}
        body = {"prompt": "x", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400 and "X-Vllm-Priority" in answer.text
