"""What files and batches take of the disk: counted before it is written, a share per key, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path

import httpx
import openai
import pytest

from quire.server.batches import store as store_module
from quire.server.batches.disk import Part
from quire.server.batches.lines import read_lines
from quire.server.batches.store import LINE_BYTES, ROWS, Store
from quire.server.errors import BadRequest, TooManyRequests
from tests.helpers.server.running import RunningServer, make_config, poll
from tests.server.batches.test_batches import ended, jsonl, line, results, run

MIB = 1 << 20


@pytest.fixture
def server(model_folder, tmp_path):
    running = RunningServer(make_config(model_folder, batch_dir=str(tmp_path / "d"), batch_disk=8 * MIB)).wait_ready()
    yield running
    running.stop()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def names(running: RunningServer) -> list[str]:
    return [path.name for path in (running.state.batches.store.folder / "files").iterdir()]


def many_lines(number: int) -> io.BytesIO:
    return jsonl([line(f"{i}", x="y" * 20) for i in range(number)])


# ---- limits


@pytest.mark.slow
def test_rows_and_outputs_are_counted_before_they_are_written(server):
    """A batch whose input fits, but not with its rows."""
    number = 8 * MIB // LINE_BYTES
    file = server.openai.files.create(file=("in.jsonl", many_lines(number)), purpose="batch")
    given = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file.id}
    for batch in [server.openai.batches.create(**given) for _ in range(4)]:
        batch = ended(server.openai, batch.id)
        assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
    assert on_disk(server.state.batches.store.folder) < 8 * MIB
    assert server.state.batches.store.used_bytes() < file.bytes + 64_000


def test_many_batches_of_one_file_stay_within_the_disk(tmp_path):
    store = Store(tmp_path, 6 * MIB)
    file = store.add_file(many_lines(3000), "a", "batch", "x", None)
    lines, _ = read_lines(store.path(file.id), "/v1/chat/completions")
    begun = []
    with contextlib.suppress(BadRequest):
        for _ in range(20):
            batch = store.add_batch("a", None, "/v1/chat/completions", file.id, "24h", 3600, None)
            store.reserve(batch.id, lines)
            list(store.begin(batch.id, lines))
            begun.append(batch.id)
    assert 1 <= len(begun) < 20
    for batch_id in begun:
        store.add_result(batch_id, 1, b"x" * 1000, True)
        assert on_disk(tmp_path) < store.max_bytes
        list(store.finish(batch_id, "cancelled", b'{"code":"batch_cancelled","message":"' + b"m" * 100 + b'"}'))
        assert on_disk(tmp_path) < store.max_bytes
    store.close()


def test_a_result_without_space_is_not_written(tmp_path):
    store = Store(tmp_path, MIB)
    file = store.add_file(many_lines(3), "a", "batch", "x", None)
    batch = store.add_batch("a", None, "/v1/chat/completions", file.id, "24h", 3600, None)
    lines, _ = read_lines(store.path(file.id), "/v1/chat/completions")
    store.reserve(batch.id, lines)
    list(store.begin(batch.id, lines))
    assert store.add_result(batch.id, 1, b"x" * 400_000, True)  # and as much in the output
    assert not store.add_result(batch.id, 2, b"x" * 400_000, True)
    assert store.missing_lines(batch.id, 0, 10)[0].number == 2
    list(store.finish(batch.id, "completed", b"{}"))
    assert store.used_bytes() < 500_000
    store.close()


def test_a_key_leaves_half_of_the_rest_to_others(tmp_path):
    store = Store(tmp_path, 8 * MIB, several=True)
    content = io.BytesIO(b"x" * MIB)
    with pytest.raises(BadRequest, match="free for you"):
        for _ in range(8):
            store.add_file(content, "a", "batch", "x", None)
    assert 3 * MIB <= store.used_bytes("a") <= 4 * MIB
    store.add_file(content, "b", "batch", "x", None)
    store.close()


def test_open_batches_of_a_key_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OPEN", 3)
    store = Store(tmp_path, 8 * MIB)
    file = {owner: store.add_file(many_lines(1), owner, "batch", "x", None).id for owner in "ab"}
    ids = [store.add_batch("a", None, "/v1/x", file["a"], "24h", 60, None).id for _ in range(3)]
    with pytest.raises(TooManyRequests, match="limit is 3"):
        store.add_batch("a", None, "/v1/x", file["a"], "24h", 60, None)
    store.add_batch("b", None, "/v1/x", file["b"], "24h", 60, None)
    list(store.fail(ids[0], []))
    store.add_batch("a", None, "/v1/x", file["a"], "24h", 60, None)
    store.close()


def test_too_many_open_batches_are_429(server, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OPEN", 0)
    file = server.openai.files.create(file=("in.jsonl", many_lines(1)), purpose="batch")
    with pytest.raises(openai.RateLimitError) as error:
        server.openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert error.value.code == "rate_limit_exceeded" and error.value.response.headers["retry-after"] == "60"
    body = {"requests": [{"custom_id": "a", "params": {"model": "alias", "max_tokens": 1, "messages": []}}]}
    answer = server.http.post("/v1/messages/batches", json=body)
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert names(server) == [file.id]  # the input of the refused one is gone


def test_an_upload_in_chunks_ends_where_the_space_ends(server):
    def chunks():
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(20):
            yield b"x" * MIB
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b", "x-requested-with": "test"}
    answer = httpx.post(f"{server.url}/v1/files", content=chunks(), headers=headers, trust_env=False)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "storage_full"
    assert not names(server) and not server.state.batches.store._held


# ---- a full disk


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_507_and_leaves_nothing(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Part, "close", full)
        with pytest.raises(openai.InternalServerError) as error:
            server.openai.files.create(file=("in.jsonl", many_lines(9)), purpose="batch")
        assert error.value.status_code == 507 and error.value.code == "storage_full"
        body = {"requests": [{"custom_id": "a", "params": {"model": "alias", "max_tokens": 1, "messages": []}}]}
        assert server.http.post("/v1/messages/batches", json=body).status_code == 507
    assert not names(server) and not server.state.batches.store._held
    assert not server.openai.files.list().data
    assert run(server.openai, [line("a")]).status == "completed"


def test_a_row_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    store = Store(tmp_path, 8 * MIB)
    monkeypatch.setattr(store, "_insert_file", full)
    with pytest.raises(Exception, match="disk is full"):
        store.add_file(many_lines(3), "a", "batch", "x", None)
    assert not list((tmp_path / "files").iterdir())
    store.close()


@pytest.mark.slow
def test_outputs_are_written_when_there_is_space_again(server, monkeypatch):
    """The results are not lost, and no part of a file stays."""
    close, failed = Part.close, []

    def close_later(part):
        if len(failed) < 2:
            failed.append(part)
            full()
        return close(part)

    file = server.openai.files.create(file=("in.jsonl", jsonl([line("a"), line("b")])), purpose="batch")
    monkeypatch.setattr(Part, "close", close_later)
    batch = server.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = ended(server.openai, batch.id)
    assert batch.status == "completed" and len(failed) == 2
    assert len(results(server.openai, batch.output_file_id)) == 2
    assert sorted(names(server)) == sorted([file.id, batch.output_file_id])


# ---- what a killed process leaves


def test_the_sweep_removes_what_nobody_knows(tmp_path):
    store = Store(tmp_path, 8 * MIB)
    kept = store.add_file(many_lines(2), "a", "batch", "x", None)
    batch = store.add_batch("a", None, "/v1/chat/completions", kept.id, "24h", 60, None)
    lines, _ = read_lines(store.path(kept.id), "/v1/chat/completions")
    list(store.begin(batch.id, lines))
    store.set_status(batch.id, "completed")  # killed before its rows were removed
    folder = tmp_path / "files"
    (folder / "file-stray").write_bytes(b"x")
    (folder / ".part-stray").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"not ours")
    writing = Part(folder)
    Store(tmp_path, 8 * MIB).close()
    assert {path.name for path in folder.iterdir()} == {kept.id, "notes.txt", writing.path.name}
    assert store._db.execute("SELECT COUNT(*) FROM lines").fetchone() == (0,)
    writing.discard()
    store.close()


def test_changes_of_many_rows_are_steps(tmp_path):
    store = Store(tmp_path, 64 * MIB)
    number = 2 * ROWS + 5
    file = store.add_file(many_lines(number), "a", "batch", "x", None)
    batch = store.add_batch("a", None, "/v1/chat/completions", file.id, "24h", 60, None)
    lines, _ = read_lines(store.path(file.id), "/v1/chat/completions")
    store.reserve(batch.id, lines)
    assert len(list(store.begin(batch.id, lines))) == 3
    assert store.batch(batch.id).total == number
    for one in lines[::50]:
        store.add_result(batch.id, one.number, b'{"n":%d}' % one.number, True)
    assert len(list(store.finish(batch.id, "cancelled", b"{}"))) >= 6
    done = store.batch(batch.id)
    outputs = store.path(done.output_file_id).read_bytes().split(b"\n")[:-1]
    assert outputs == [b'{"n":%d}' % one.number for one in lines[::50]]
    assert len(store.path(done.error_file_id).read_bytes().splitlines()) == number - len(outputs)
    store.close()


def test_only_the_user_can_read(server, tmp_path):
    batch = run(server.openai, [line("a")])
    assert batch.status == "completed"
    folder = server.state.batches.store.folder
    poll(lambda: len(names(server)) == 2)
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
