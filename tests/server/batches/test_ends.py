"""Batches always end, whatever their lines hold and whatever fails."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.batches import runner
from quire.server.http import in_process
from tests.helpers.server.running import RunningServer, make_config
from tests.server.batches.test_batches import ended, line, results, run


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory) -> Iterator[RunningServer]:
    folder = str(tmp_path_factory.mktemp("batches"))
    running = RunningServer(make_config(model_folder, batch_dir=folder))
    yield running.wait_ready()
    running.stop()


def run_text(server: RunningServer, text: bytes, endpoint: str = "/v1/completions"):
    file = server.openai.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
    batch = server.openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    return ended(server.openai, batch.id)


def completion(custom_id: str, body: bytes) -> bytes:
    return b'{"custom_id":"%b","method":"POST","url":"/v1/completions","body":%b}\n' % (custom_id.encode(), body)


GOOD = b'{"prompt":"hello","max_tokens":2}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [b"1e9999", b"-1e9999", b"1" * 5000, b'"\xff\xfe"', b"[" * 900 + b"]" * 900, b'"\\ud83dx"', b"{]", b"NaN", b""],
    ids=["inf", "-inf", "digits", "bytes", "deep", "surrogate", "brackets", "nan", "nothing"],
)
@pytest.mark.parametrize("field", ["user", "stream", "temperature", "prompt"])
def test_a_value_that_no_decoder_takes_is_the_lines_own_error(server, field, value):
    bad = b'{"prompt":"hello","max_tokens":3,"%b":%b,"stop":null}' % (field.encode(), value)
    batch = run_text(server, completion("good", GOOD) + completion("bad", bad) + completion("last", GOOD))
    if batch.status == "failed":  # not JSON at all, which the line's own decoder sees
        assert batch.errors.data[0].line == 2
        return
    assert batch.status == "completed"
    found = results(server.openai, batch.output_file_id) + results(server.openai, batch.error_file_id)
    assert {one["custom_id"] for one in found} == {"good", "bad", "last"}
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in found}
    assert statuses["good"] == statuses["last"] == 200 and statuses["bad"] in (200, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["prompt", "max_tokens", "stream", "stop", "user", "n", "logit_bias", "temperature", "x"])
BODIES = st.dictionaries(NAMES, JSON, max_size=4).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=24)


@pytest.mark.slow
@given(st.lists(BODIES, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_batch_of_generated_lines_ends(server, bodies):
    text = b"".join(completion(f"{i}", body.replace(b"\n", b" ")) for i, body in enumerate(bodies))
    batch = run_text(server, text)
    assert batch.status in ("completed", "failed")
    if batch.status == "completed":
        found = results(server.openai, batch.output_file_id) + results(server.openai, batch.error_file_id)
        assert sorted(one["custom_id"] for one in found) == [f"{i}" for i in range(len(bodies))]


def test_any_exception_is_the_lines_own_error(server, monkeypatch):
    call = in_process.call

    async def fails(app, path, body, scope):
        if b"say b" in body:
            raise RuntimeError("unforeseen")
        return await call(app, path, body, scope)

    monkeypatch.setattr(in_process, "call", fails)
    batch = run(server.openai, [line("a"), line("b"), line("c")])
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    (error,) = results(server.openai, batch.error_file_id)
    assert error["custom_id"] == "b" and error["response"]["status_code"] == 500


@pytest.mark.slow
def test_a_line_that_is_always_answered_by_503_ends(server, monkeypatch):
    attempts = []

    async def busy(app, path, body, scope):
        attempts.append(path)
        return 503, "r", b'{"error":{"message":"busy"}}'

    monkeypatch.setattr(in_process, "call", busy)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    batch = run(server.openai, [line("a")])
    assert batch.status == "completed" and len(attempts) == runner.MAX_ATTEMPTS
    assert results(server.openai, batch.error_file_id)[0]["response"]["status_code"] == 503


@pytest.mark.slow
def test_a_batch_that_cannot_be_run_fails_after_some_attempts(server, monkeypatch):
    def broken(path, endpoint):
        attempts.append(path)
        raise OSError("I/O error")

    attempts: list = []
    monkeypatch.setattr(runner, "read_lines", broken)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.001)
    batch = run(server.openai, [line("a")])
    assert batch.status == "failed" and len(attempts) == runner.MAX_ATTEMPTS
    assert "failed to read" in batch.errors.data[0].message
    assert not server.state.batches._failures
