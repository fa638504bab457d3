"""/v1/files and /v1/batches with OpenAI's client, on a real server with the fake executor."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from quire.cli.bench.process import free_port
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.running import RunningServer, make_config, poll


def jsonl(lines: list[dict]) -> io.BytesIO:
    return io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())


def line(custom_id: str, endpoint: str = "/v1/chat/completions", **body) -> dict:
    body = {"messages": [{"role": "user", "content": f"say {custom_id}"}], "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def run(client: openai.OpenAI, lines: list[dict], **options) -> openai.types.Batch:
    """The batch when it has ended."""
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    given = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | options
    batch = client.batches.create(input_file_id=file.id, **given)
    return ended(client, batch.id)


def ended(client: openai.OpenAI, batch_id: str, timeout: float = 30) -> openai.types.Batch:
    open_ = ("validating", "in_progress", "finalizing", "cancelling")
    poll(lambda: client.batches.retrieve(batch_id).status not in open_, timeout)
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()] if file_id else []


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory) -> Iterator[RunningServer]:
    folder = str(tmp_path_factory.mktemp("batches"))
    running = RunningServer(make_config(model_folder, batch_dir=folder, batch_disk=8 << 20))
    yield running.wait_ready()
    running.stop()


def test_a_batch_answers_each_line_as_the_endpoint_would(server):
    batch = run(server.openai, [line(f"r{i}", seed=i) for i in range(50)], metadata={"job": "nightly"})
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"job": "nightly"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (50, 50, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    found = results(server.openai, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [f"r{i}" for i in range(50)]
    for i, one in enumerate(found):
        alone = server.http.post("/v1/chat/completions", json=line(f"r{i}", seed=i)["body"]).json()
        assert one["error"] is None and one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"] == alone["choices"]
        assert one["response"]["body"]["usage"]["completion_tokens"] == 4


def test_lines_that_fail_go_to_the_error_file(server):
    lines = [line("good"), line("bad", temperature=9), line("unknown", model="none"), line("streams", stream=True)]
    batch = run(server.openai, lines)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    errors = {one["custom_id"]: one["response"] for one in results(server.openai, batch.error_file_id)}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "bad": 400,
        "unknown": 404,
        "streams": 400,
    }
    assert errors["bad"]["body"]["error"]["param"] == "temperature"


def test_completions_too(server):
    lines = [line("a", "/v1/completions", prompt="one") | {"body": {"prompt": "one", "max_tokens": 3}}]
    batch = run(server.openai, lines, endpoint="/v1/completions")
    assert results(server.openai, batch.output_file_id)[0]["response"]["body"]["object"] == "text_completion"


def test_responses_too(server):
    body = {"input": "one", "max_output_tokens": 16}
    lines = [line("a", "/v1/responses") | {"body": body}, line("b", "/v1/responses") | {"body": body | {"store": True}}]
    lines.append(line("c", "/v1/responses") | {"body": body | {"background": True}})
    batch = run(server.openai, lines, endpoint="/v1/responses")
    unstored, stored = (one["response"]["body"] for one in results(server.openai, batch.output_file_id))
    assert unstored["status"] in ("incomplete", "completed") and (unstored["store"], stored["store"]) == (False, True)
    assert server.openai.responses.retrieve(stored["id"]).to_dict() == stored
    (refused,) = results(server.openai, batch.error_file_id)
    assert refused["response"]["body"]["error"]["param"] == "background"


def test_a_result_is_one_line_whatever_ends_a_line_of_text(server):
    text = "a\x85b\u2028c\u2029d\x1ee\r\n"
    lines = [
        line(f"r{i}", "/v1/completions") | {"body": {"prompt": text, "echo": True, "max_tokens": 1}} for i in (1, 2)
    ]
    batch = run(server.openai, lines, endpoint="/v1/completions")
    content = server.openai.files.content(batch.output_file_id).text
    assert len(content.splitlines()) == 2
    assert json.loads(content.splitlines()[1])["response"]["body"]["choices"][0]["text"].startswith(text)


@pytest.mark.parametrize(
    ("text", "message", "number"),
    [
        (b"", "no requests", None),
        (b"{\n", "not a request", 1),
        (b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":[]}\n', "must be an object", 1),
        (json.dumps(line("a")).encode() + b"\n\n" + json.dumps(line("a")).encode(), "used by an earlier line", 3),
        (json.dumps(line("a", "/v1/completions")).encode(), "endpoint of the batch", 1),
        (json.dumps(line("a") | {"method": "GET"}).encode(), "method must be POST", 1),
        (json.dumps(line("x" * 600)).encode(), "1 to 512 characters", 1),
        (b"[" * 100_000, "not a request", 1),
    ],
)
def test_an_invalid_file_fails_the_batch_and_names_the_line(server, text, message, number):
    file = server.openai.files.create(file=("in.jsonl", text or b"\n"), purpose="batch")
    batch = server.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = ended(server.openai, batch.id)
    assert batch.status == "failed" and batch.failed_at
    assert message in batch.errors.data[0].message and batch.errors.data[0].line == number


@pytest.mark.slow
def test_cancelling_keeps_the_results_so_far(server):
    lines = [line("short"), *(line(f"long{i}", max_tokens=450, ignore_eos=True) for i in range(2000))]
    file = server.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = server.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    poll(lambda: server.openai.batches.retrieve(batch.id).request_counts.completed, 30)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        server.openai.files.delete(file.id)
    assert server.openai.batches.cancel(batch.id).status == "cancelling"
    batch = ended(server.openai, batch.id)
    assert batch.status == "cancelled" and 0 < batch.request_counts.completed < 2001
    done, rest = (results(server.openai, name) for name in (batch.output_file_id, batch.error_file_id))
    assert {one["custom_id"] for one in done + rest} == {one["custom_id"] for one in lines}
    assert {one["error"]["code"] for one in rest} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        server.openai.batches.cancel(batch.id)
    assert server.openai.files.delete(file.id).deleted
    poll(lambda: server.state.client.num_open == 0, 10)


def test_files_come_back_as_they_were_sent(server):
    client, content = server.openai, os.urandom(100_000)
    file = client.files.create(
        file=("a/b.bin", content), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose) == (100_000, "a_b.bin", "user_data")
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id).id == file.id
    assert file.id in {one.id for one in client.files.list(purpose="user_data", limit=1)}
    assert client.files.delete(file.id).deleted
    for use in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            use(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(
            input_file_id=client.files.create(file=b"x", purpose="user_data").id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )


def test_a_file_that_is_deleted_while_it_is_read(server, monkeypatch):
    """Between the look at the database and the file, and with the file open."""
    client, content, store = server.openai, os.urandom(3 << 20), server.state.batches.store
    file, open_file = client.files.create(file=content, purpose="vision"), type(store).open

    def open_late(self, file_id):
        self.path(file_id).unlink()
        return open_file(self, file_id)

    def open_early(self, file_id):
        opened = open_file(self, file_id)
        self.delete_file(file_id, "")
        return opened

    monkeypatch.setattr(type(store), "open", open_early)
    assert client.files.content(file.id).content == content
    file = client.files.create(file=content, purpose="vision")
    monkeypatch.setattr(type(store), "open", open_late)
    with pytest.raises(openai.NotFoundError, match="No such file"):
        client.files.content(file.id)


def test_lists_have_pages(server):
    client = server.openai
    ids = [client.files.create(file=f"{i}".encode(), purpose="evals").id for i in range(5)]
    assert [one.id for one in client.files.list(purpose="evals", order="asc", limit=2)] == ids or set(ids) == {
        one.id for one in client.files.list(purpose="evals", order="asc", limit=2)
    }
    first = client.files.list(purpose="evals", limit=2)
    assert len(first.data) == 2 and first.has_more
    known = [one.id for one in client.batches.list(limit=1)]
    assert len(known) == len(set(known)) >= 2


def test_wrong_requests_are_refused(server):
    post = server.http.post
    form = {"files": {"file": b"x"}, "headers": {"x-requested-with": "test"}}
    assert post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}).status_code == 415  # a web page could
    assert post("/v1/files", json={}).status_code == 415
    assert (
        post("/v1/files", data={"purpose": "batch"}, **form | {"files": {"x": b""}}).json()["error"]["param"] == "file"
    )
    assert post("/v1/files", data={"purpose": "fun"}, **form).json()["error"]["param"] == "purpose"
    assert post("/v1/files", **form).json()["error"]["param"] == "purpose"
    broken = {"content-type": "multipart/form-data; boundary=x", "x-requested-with": "test"}
    assert post("/v1/files", content=b"--y\r\n", headers=broken).status_code == 400
    assert post("/v1/files", content=b"", headers=broken | {"content-type": "multipart/form-data"}).status_code == 400
    too_much = {"file": b"x" * (9 << 20)}
    refused = post("/v1/files", data={"purpose": "batch"}, **form | {"files": too_much})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "storage_full"
    body = {"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for change, status, param in (
        ({}, 404, "file_id"),
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "99d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
    ):
        answer = post("/v1/batches", json=body | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert server.http.get("/v1/batches?limit=0").json()["error"]["param"] == "limit"
    assert server.http.get("/v1/files?order=up").json()["error"]["param"] == "order"
    assert server.http.get("/v1/batches/none").status_code == 404


def test_without_a_folder_the_answer_names_the_flag(model_folder):
    running = RunningServer(make_config(model_folder)).wait_ready()
    try:
        assert "--batch-dir" in running.http.get("/v1/batches").json()["error"]["message"]
    finally:
        running.stop()


def test_keys_see_their_own_files_only(model_folder, tmp_path):
    running = RunningServer(make_config(model_folder, batch_dir=str(tmp_path), api_key=["one", "two"])).wait_ready()
    try:
        mine, other = running.openai_with("one"), running.openai_with("two")
        batch = run(mine, [line("a")])
        assert batch.status == "completed"
        for use, name in (
            (other.files.content, batch.output_file_id),
            (other.files.delete, batch.input_file_id),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                use(name)
        assert not other.batches.list().data and not other.files.list().data
    finally:
        running.stop()


@pytest.mark.slow
def test_a_window_that_ends_expires_the_rest(model_folder, tmp_path):
    running = RunningServer(make_config(model_folder, batch_dir=str(tmp_path))).wait_ready()
    try:
        lines = [line(f"{i}", max_tokens=450, ignore_eos=True) for i in range(3000)]
        file = running.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = running.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1m"
        )
        store = running.state.batches.store
        poll(lambda: running.openai.batches.retrieve(batch.id).request_counts.completed, 30)
        store._db.execute("UPDATE batches SET expires_at = ?", (int(time.time()) - 1,))
        batch = ended(running.openai, batch.id)
        assert batch.status == "expired" and batch.expired_at
        assert {one["error"]["code"] for one in results(running.openai, batch.error_file_id)} == {"batch_expired"}
    finally:
        running.stop()


@pytest.mark.slow
def test_a_killed_server_continues_without_doing_a_line_twice(model_folder, tmp_path):
    """kill -9 in the middle of a batch, several times."""
    port, folder = free_port(), str(tmp_path / "batches")
    command = [sys.executable, "-m", "quire", "serve", model_folder, "--port", str(port), "--batch-dir", folder]
    command += ["--distributed-executor-backend", BACKEND, "--max-model-len", "512", "--max-num-seqs", "8"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    batch_id = ""
    for kill_at in (40, 120, None):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            poll(lambda: _is_ready(port), 60)
            if not batch_id:
                lines = [line(f"{i}", max_tokens=100, ignore_eos=True, model=model_folder) for i in range(200)]
                file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
                batch_id = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
            if kill_at is None:
                batch = ended(client, batch_id, 60)
                assert (batch.status, batch.request_counts.completed) == ("completed", 200)
                names = [one["custom_id"] for one in results(client, batch.output_file_id)]
                assert names == [f"{i}" for i in range(200)]
            else:
                poll(lambda at=kill_at, id=batch_id: client.batches.retrieve(id).request_counts.completed >= at, 60)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert {path.name for path in Path(folder, "files").iterdir()} == {file.id, batch.output_file_id}


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_an_upload_without_python_multipart_names_the_package(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    monkeypatch.setitem(sys.modules, "python_multipart.exceptions", None)
    with pytest.raises(openai.InternalServerError) as raised:
        server.openai.with_options(max_retries=0).files.create(file=b"x", purpose="batch")
    assert raised.value.status_code == 501 and "pip install 'quire[files]'" in raised.value.message
