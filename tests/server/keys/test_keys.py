"""Named keys with limits, as clients meet them."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
import yaml

from quire.cli import hash_key
from quire.configs.config import Config
from quire.server.keys import ring
from quire.server.keys.key import digest as key_digest
from quire.server.keys.key import hashed
from quire.server.routes import ROUTES
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.running import MODEL, poll, running_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BODY = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
KEYS = [
    {"name": "free", "key": "k-free"},
    {"name": "hashed", "key": hashed("k-hashed"), "admin": True},
    {"name": "few", "key": "k-few", "requests_per_minute": 2},
    {"name": "tokens", "key": "k-tokens", "tokens_per_minute": 30},
    {"name": "day", "key": "k-day", "tokens_per_day": 5},
    {"name": "alias", "key": "k-alias", "models": ["alias"]},
    {"name": "none", "key": "k-none", "models": []},
    {"name": "low", "key": "k-low", "max_priority": 5},
    {"name": "one", "key": "k-one", "max_concurrent_requests": 1},
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys")
    (path / "keys.yaml").write_text(yaml.safe_dump({"keys": KEYS}))
    return path


def settings(folder: Path) -> dict:
    return {
        "api_key_file": str(folder / "keys.yaml"),
        "key_usage_file": str(folder / "usage.sqlite"),
        "audit_log": str(folder / "audit.jsonl"),
        "api_key": ["k-plain"],
        "admin_api_key": ["k-admin"],
        "scheduling_policy": "priority",
    }


@pytest.fixture(scope="module")
def server(model_folder, folder):
    with running_server(model_folder, fake="step_delay=0.005", **settings(folder)) as running:
        yield running.wait_ready()


def ask(server, key: str, path: str = CHAT, **fields):
    return server.http.post(path, json=BODY | fields, headers=bearer(key))


def error_of(answer) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("key", ["k-free", "k-hashed", "k-plain", "k-admin"])
def test_keys_of_all_sources(server, key):
    assert ask(server, key).status_code == 200


@pytest.mark.parametrize("key", ["nope", hashed("k-hashed"), "k-fre"])
def test_other_keys(server, key):
    assert ask(server, key).status_code == 401


def test_routes_of_administrators(server):
    for key, status in (("k-free", 403), ("k-plain", 403), ("k-hashed", 200), ("k-admin", 200), ("nope", 401)):
        assert server.http.get("/server_info", headers=bearer(key)).status_code == status
        assert server.http.post("/reset_prefix_cache", headers=bearer(key)).status_code == status
        profile = server.http.post("/start_profile", headers=bearer(key)).status_code
        assert profile == (404 if status == 200 else status)  # without a folder for profiles there are none
    text = server.http.get("/server_info", headers=bearer("k-admin")).text
    assert not any(one["key"] in text for one in KEYS) and "k-plain" not in text and "k-admin" not in text


def path_of(route) -> str:
    return re.sub(r"\{[^}]*\}", "0", route.path)


def test_every_route_of_administrators(server):
    """Those whose path has a parameter, too. Other methods of the same path are open."""
    admin = [route for route in ROUTES if route.admin]
    assert "/slots/{id}" in {route.path for route in admin}
    for route in admin:
        for key, status in (("k-free", 403), ("k-plain", 403), ("nope", 401), ("", 401)):
            headers = bearer(key) if key else {}
            answer = server.http.request(route.method, path_of(route), headers=headers)
            assert answer.status_code == status, (route.method, route.path, key)
    assert server.http.get("/lora-adapters", headers=bearer("k-free")).json() == []


def test_a_key_of_no_model_learns_nothing_of_it(server):
    """Of all GETs without parameters these answer such a key."""
    general = {"/live", "/ready", "/health", "/ping", "/version", "/is_sleeping", "/api/version", "/load", "/metrics"}
    lists = {path.strip() for path in LISTS} | {"/lora-adapters"}
    for route in ROUTES:
        if route.method == "GET" and not route.admin and "{" not in route.path:
            answer = server.http.get(route.path, headers=bearer("k-none"))
            assert (answer.status_code == 200) == (route.path in general | lists), (route.path, answer.text[:200])
    texts = [server.http.get(path, headers=bearer("k-none")).text for path in lists]
    assert not any(MODEL in text for text in texts)
    answer = ask(server, "k-none", "/infill", input_prefix="a", input_suffix="b")
    assert answer.status_code == 403  # before what the model cannot do


def test_requests_per_minute_as_the_sdk_sees_them(server):
    with server.openai_with("k-few") as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        for create in (
            lambda: client.chat.completions.create(model=MODEL, messages=HELLO, stream=True),
            lambda: client.responses.create(model=MODEL, input="x"),
        ):
            with pytest.raises(openai.RateLimitError) as caught:
                create()
            assert caught.value.code == "rate_limit_exceeded"
            assert 20 <= int(caught.value.response.headers["retry-after"]) <= 30
            assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    # what is no request to the model is not counted, nor limited
    assert server.http.get("/v1/models", headers=bearer("k-few")).status_code == 200


@pytest.mark.parametrize(
    "path,body",
    [
        ("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 1}),
        ("/api/chat", {"model": MODEL, "messages": HELLO}),
        ("/generate", {"inputs": "x"}),
    ],
)
def test_every_dialect_is_limited(server, path, body):
    for _ in range(3):
        answer = server.http.post(path, json=body, headers=bearer("k-few"))
    assert answer.status_code == 429 and "retry-after" in answer.headers


def test_tokens_per_minute(server):
    statuses = [ask(server, "k-tokens", max_tokens=40, ignore_eos=True).status_code for _ in range(2)]
    assert statuses == [200, 429]
    answer = ask(server, "k-tokens")
    assert error_of(answer) == (429, "rate_limit_exceeded") and answer.headers["x-ratelimit-limit-tokens"] == "30"


def test_models_of_a_key(server):
    assert ask(server, "k-alias", model="alias").status_code == 200
    assert ask(server, "k-alias").status_code == 200  # without a name: the model that is served
    assert error_of(ask(server, "k-alias", model=MODEL)) == (403, "model_not_found")
    assert ask(server, "k-alias", model="other").status_code == 404
    for path in ("/tokenize", "/apply-template", "/v1/chat/completions/render", "/v1/messages/count_tokens"):
        assert ask(server, "k-alias", path, model=MODEL).status_code == 403, path


LISTS = {
    "/v1/models": lambda answer: [one["id"] for one in answer["data"]],
    "/v1/models ": lambda answer: [one["id"] for one in answer["data"]],  # in Anthropic's form
    "/api/tags": lambda answer: [one["name"] for one in answer["models"]],
    "/api/ps": lambda answer: [one["name"] for one in answer["models"]],
}


@pytest.mark.parametrize("path", LISTS)
def test_a_key_sees_its_models(server, path):
    headers = {"anthropic-version": "2023-06-01"} if path.endswith(" ") else {}
    for key, names in (("k-free", [MODEL, "alias"]), ("k-alias", ["alias"]), ("k-none", [])):
        answer = server.http.get(path.strip(), headers=headers | bearer(key)).json()
        assert LISTS[path](answer) == names


def test_a_key_sees_no_other_model(server):
    assert server.http.get("/v1/models/alias", headers=bearer("k-alias")).json()["id"] == "alias"
    assert server.http.get(f"/v1/models/{MODEL}", headers=bearer("k-alias")).status_code == 403
    answer = server.http.get("/v1/models/other", headers=bearer("k-alias"))
    assert answer.status_code == 404 and MODEL not in answer.text
    assert server.http.post("/api/show", json={"model": MODEL}, headers=bearer("k-alias")).status_code == 403


def test_priorities_of_a_key(server):
    assert ask(server, "k-low", priority=5).status_code == 200
    assert ask(server, "k-low").status_code == 200
    answer = ask(server, "k-low", priority=4)
    assert answer.status_code == 400 and "max_priority" in answer.text


def test_requests_in_flight_are_counted_until_their_answers_end(server):
    fields = {"max_tokens": 300, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", CHAT, json=BODY | fields, headers=bearer("k-one")) as answer:
        assert answer.status_code == 200
        assert error_of(ask(server, "k-one")) == (429, "rate_limit_exceeded")
    poll(lambda: ask(server, "k-one").status_code == 200)


def test_a_spent_day_survives_a_restart(server, model_folder, folder):
    assert ask(server, "k-day").status_code == 200
    answer = ask(server, "k-day")
    assert error_of(answer) == (429, "insufficient_quota") and int(answer.headers["retry-after"]) > 0
    with running_server(model_folder, **settings(folder)) as second:
        second.wait_ready()
        assert error_of(ask(second, "k-day")) == (429, "insufficient_quota")


def test_usage_in_metrics_and_audit_log(server, folder):
    answer = ask(server, "k-plain", user="x", messages=[{"role": "user", "content": "a secret word"}])
    usage, request_id = answer.json()["usage"], answer.headers["x-request-id"]
    rows = poll(lambda: [row for row in read_rows(folder) if row["request_id"] == request_id])
    assert len(rows) == 1
    row = rows[0]
    assert (row["key"], row["route"], row["status"], row["model"]) == ("key-1", CHAT, 200, MODEL)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    text = (folder / "audit.jsonl").read_text()
    assert "secret" not in text and "k-plain" not in text
    assert all(row["status"] == 200 or row["status"] is None for row in read_rows(folder))  # refused ones have none
    page = server.http.get("/metrics", headers=bearer("k-admin")).text
    assert 'quire:key_generation_tokens_total{key="key-1"}' in page
    assert 'quire:key_requests_refused_total{code="insufficient_quota",key="day"}' in page


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_file_is_read_again(server, folder):
    path = folder / "keys.yaml"
    before = path.read_text()
    try:
        path.write_text("keys: [{name: new, key: ")
        time.sleep(1.1)
        assert ask(server, "k-free").status_code == 200  # a file that cannot be read changes nothing
        path.write_text(yaml.safe_dump({"keys": [*KEYS[1:], {"name": "new", "key": "k-new"}]}))
        poll(lambda: ask(server, "k-new").status_code == 200)
        assert ask(server, "k-free").status_code == 401
    finally:
        path.write_text(before)
    poll(lambda: ask(server, "k-free").status_code == 200)


def test_metrics_are_written_down_in_a_thread(server, monkeypatch):
    """Four series per key: those of ten thousand took the event loop a second."""
    metrics, threads = server.state.metrics, []
    render = metrics.render

    def noted(*view) -> bytes:
        threads.append(threading.current_thread().name)
        return render(*view)

    monkeypatch.setattr(metrics, "render", noted)
    answer = server.http.get("/metrics", headers=bearer("k-admin"))
    assert answer.status_code == 200 and "quire:num_requests_running" in answer.text
    assert threads[0].startswith("large-work")


def test_only_an_admin_key(model_folder):
    with running_server(model_folder, admin_api_key=["boss"]) as running:
        running.wait_ready()
        assert running.http.post(CHAT, json=BODY).status_code == 200
        assert running.http.get("/server_info").status_code == 401
        assert running.http.get("/server_info", headers=bearer("boss")).status_code == 200


def test_hash_key(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("sécret\n"))
    assert hash_key.main([]) == 0
    assert capsys.readouterr().out.strip() == "sha256:" + hashlib.sha256("sécret".encode()).hexdigest()
    assert hash_key.main(["--new"]) == 0
    key, its_hash = capsys.readouterr().out.split()
    assert hashed(key) == its_hash and len(key) > 40


def test_a_wrong_file_ends_the_start(tmp_path, model_folder):
    (tmp_path / "keys.yaml").write_text("keys: [{name: a}]")
    command = [sys.executable, "-m", "quire", "serve", model_folder, "--port", "0"]
    command += ["--distributed-executor-backend", BACKEND, "--api-key-file", str(tmp_path / "keys.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "missing required field `key`" in ended.stderr


@pytest.mark.slow
def test_ten_thousand_keys(tmp_path, monkeypatch):
    """A request costs as much as with one; a large file that changes is read in a thread, and takes effect then."""
    monkeypatch.setattr(ring, "_LOOK_SECONDS", 0.0)
    path = tmp_path / "keys.yaml"
    lines = [f"- {{name: user-{i}, key: key-{i}-abcdefgh}}" for i in range(10_000)]
    path.write_text("\n".join(["keys:", *lines]))
    keys = ring.KeyRing(Config.from_flat(model="m", api_key_file=str(path), api_key=["plain"]).server)
    hashed_with: list[bytes] = []
    monkeypatch.setattr(ring, "digest", lambda text: hashed_with.append(text) or key_digest(text))
    monkeypatch.setattr(ring.Holder, "__getattribute__", None)  # none of them is looked at
    assert keys.find(b"nobody's") is None and hashed_with == [b"nobody's"]
    monkeypatch.undo()
    monkeypatch.setattr(ring, "_LOOK_SECONDS", 0.0)
    found = keys.find(b"key-9999-abcdefgh")
    assert found.key.name == "user-9999" and keys.key_of_owner(found.owner) is found.key
    assert keys.find(b"plain").key.name == "key-1"
    read_in: list[str] = []
    read = ring.read_keys
    monkeypatch.setattr(ring, "read_keys", lambda path: read_in.append(threading.current_thread().name) or read(path))
    path.write_text("\n".join(["keys:", *lines[:-1], "- {name: new, key: the-new-one}"]))
    poll(lambda: keys.find(b"the-new-one") is not None)
    assert keys.find(b"key-9999-abcdefgh") is None and read_in[0].startswith("keys")
    path.write_text("keys: nothing")
    keys.find(b"plain")
    assert keys.find(b"the-new-one") is not None  # what cannot be read changes nothing
    keys.close()
