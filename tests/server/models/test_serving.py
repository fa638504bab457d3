"""A server of three models, whose engines have the fake executor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import anthropic
import openai
import pytest

from quire.checkpoints.library import aliases
from quire.checkpoints.library.entries import Entry
from quire.configs.config import Config
from quire.server.models import manager, router
from quire.server.models.launch import ModelsLauncher
from quire.server.models.need import Planned
from quire.server.startup.engine_group import TERMINATE_TIMEOUT
from tests.helpers.library_stores import isolated_home
from tests.helpers.server.running import poll, running_server, write_model_folder

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
NAMES = ["one", "two", "three"]


class Plans:
    """Plans of 4 MiB, at once: the fake executor has no memory to plan."""

    def __init__(self, entries):
        self.plan = Planned(weights=4 << 20, max_model_len=512, available=1 << 30, total=1 << 30)

    async def get(self, name):
        return self.plan

    def finished(self, name):
        return self.plan

    async def run(self):
        """All are planned."""

    async def close(self):
        """There is no process."""


@pytest.fixture(autouse=True, scope="module")
def _plans():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "Planner", Plans)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        (root / name).mkdir()
        write_model_folder(root / name)
    return [str(root / name) for name in NAMES]


@contextmanager
def several(folders, fake: str = "", **settings):
    """A server of these models; `fake` are the options of engines that start later, too."""
    first, *others = folders
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_EXECUTOR", fake)
        with running_server(first, fake=fake, models=others, **{"served_model_name": []} | settings) as server:
            yield server


@pytest.fixture(scope="module")
def server(folders):
    with several(folders, alias=["fast=two"]) as running:
        yield running.wait_ready()


def statuses(server) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in server.http.get("/v1/models").json()["data"]}


def unload(server, name: str) -> None:
    model = server.launcher.frontend.models.models[name]
    if model.status == "loaded":
        server.http.post("/models/unload", json={"model": name}).raise_for_status()
    poll(lambda: model.status == "unloaded")


def test_it_is_ready_at_once_and_lists_what_there_is(folders):
    with several(folders) as server:
        server.wait_ready()
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
        assert statuses(server) == dict.fromkeys(NAMES, "unloaded")
        assert [one["name"] for one in server.http.get("/api/tags").json()["models"]] == NAMES
        assert server.http.get("/api/ps").json() == {"models": []}
        card = server.http.get("/v1/models/two").json()
        assert card["id"] == "two" and card["max_model_len"] == 512 and card["size"] == 4 << 20
        assert folders[0] not in server.http.get("/v1/models").text


REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", REQUESTS)
def test_the_model_of_every_dialect_chooses(server, path):
    for name, shown in (("two", "two"), ("fast", "two"), (None, "one"), ("three", "three")):
        body = REQUESTS[path] | ({"model": name} if name else {})
        if name is None and path in ("/v1/messages", "/api/chat", "/api/generate"):
            continue  # they require it
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] in (shown, name), path
    if path.startswith("/api"):
        tagged = server.http.post(path, json=REQUESTS[path] | {"model": "two:latest"})
        assert tagged.status_code == 200 and tagged.json()["model"] == "two:latest"


@pytest.mark.parametrize("path", [*REQUESTS, "/tokenize", "/api/show", "/v1/embeddings"])
def test_an_unknown_name_is_404_with_the_list(server, path):
    answer = server.http.post(path, json=REQUESTS.get(path, {}) | {"model": "four"})
    assert answer.status_code == 404 and "'one', 'two', 'three'" in answer.text


def test_what_names_no_model_loads_none(folders):
    with several(folders) as server:
        server.wait_ready()
        for path, body in (("/v1/chat/completions", b"{"), ("/v1/chat/completions", b"[]"), ("/v1/nothing", b"{}")):
            answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
        assert server.http.get("/v1/chat/completions").status_code == 405
        assert server.http.post("/v1/chat/completions", json=CHAT | {"model": 5}).json()["error"]["param"] == "model"
        shown = server.http.post("/api/show", json={"model": "two"}).json()
        assert shown["details"]["format"] and statuses(server) == dict.fromkeys(NAMES, "unloaded")


@pytest.mark.slow
def test_streams_equal_those_of_a_server_with_one_model(server, folders):
    def text(client, model):
        stream = client.chat.completions.create(model=model, stream=True, seed=1, **CHAT)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with running_server(folders[1]) as alone:
        alone.wait_ready()
        assert text(server.openai, "two") == text(alone.openai, "alias") != ""


def test_ollamas_keep_alive(server):
    def ask(path, **body):
        return server.http.post(path, json={"model": "two", "stream": False} | body).json()

    assert ask("/api/generate")["done_reason"] == "load" and statuses(server)["two"] == "loaded"
    (running,) = (one for one in server.http.get("/api/ps").json()["models"] if one["name"] == "two")
    assert running["expires_at"].startswith("2318")
    assert ask("/api/generate", keep_alive="5m")["done_reason"] == "load"
    (running,) = (one for one in server.http.get("/api/ps").json()["models"] if one["name"] == "two")
    assert not running["expires_at"].startswith("2318")
    assert ask("/api/generate", keep_alive=0)["done_reason"] == "unload"
    poll(lambda: statuses(server)["two"] == "unloaded")
    assert ask("/api/generate", keep_alive=0)["done_reason"] == "unload"
    assert statuses(server)["two"] == "unloaded"
    refused = server.http.post("/api/generate", json={"model": "two", "keep_alive": "soon"})
    assert refused.status_code == 400 and "keep_alive" in refused.text
    assert ask("/api/generate", keep_alive=-1)["done_reason"] == "load"


def test_loading_and_unloading_by_hand(server):
    unload(server, "three")
    events: list[dict] = []

    def watch():
        with server.http.stream("GET", "/models/sse") as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                if events and events[-1]["data"]["value"] == "loaded" and events[-1]["model"] == "three":
                    return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    poll(lambda: len(events) >= 3)
    assert server.http.post("/models/load", json={"model": "three"}).json() == {"success": True}
    watching.join(30)
    seen = [one["data"]["value"] for one in events if one["model"] == "three"]
    assert seen[0] == "unloaded" and "loading" in seen and seen[-1] == "loaded"
    unload(server, "three")
    again = server.http.post("/models/unload", json={"model": "three"})
    assert again.status_code == 400 and again.json()["error"]["code"] == "model_not_loaded"


@pytest.mark.slow
def test_unloading_ends_a_load_at_once(folders):
    with several(folders, fake="load_delay=30") as server:
        server.wait_ready()
        model = server.launcher.frontend.models.models["one"]
        assert server.http.post("/models/load", json={"model": "one"}).json() == {"success": True}
        poll(lambda: model.state.phase == "loading weights")
        os.kill(model._engines.processes[0].pid, signal.SIGSTOP)  # as compiled code, it notices nothing
        started = time.monotonic()
        headers = {"x-requested-with": "test"}
        assert server.http.post("/sleep?model=one", headers=headers).status_code == 200
        assert model.status == "unloaded" and time.monotonic() - started < TERMINATE_TIMEOUT / 2


def test_sleeping_and_waking(server):
    headers = {"x-requested-with": "test"}
    assert server.http.post("/wake_up?model=two", headers=headers).status_code == 200
    assert server.http.get("/is_sleeping?model=two").json() == {"is_sleeping": False}
    assert server.http.post("/sleep?model=two&level=2", headers=headers).status_code == 200
    assert server.http.get("/is_sleeping?model=two").json() == {"is_sleeping": True}
    assert server.openai.chat.completions.create(model="two", **CHAT).model == "two"
    assert server.http.post("/sleep?level=9", headers=headers).status_code == 400
    assert server.http.post("/sleep").status_code == 415


def test_metrics_and_the_state_of_the_whole_server(server):
    for name in NAMES:
        server.openai.chat.completions.create(model=name, **CHAT)
    unload(server, "three")
    page = server.http.get("/metrics").text
    for name in NAMES:
        assert f'quire:generation_tokens_total{{engine="0",model_name="{name}"}}' in page
    assert page.count("# HELP quire:generation_tokens_total") == 1 and "http_requests_total{" in page
    assert server.http.get("/load").json()["server_load"] >= 1
    assert server.http.get("/requests").json() == {"requests": []}
    paths = server.http.get("/openapi.json").raise_for_status().json()["paths"]
    assert {"/models/load", "/models/sse", "/sleep", "/v1/chat/completions"} <= paths.keys()
    info = server.http.get("/server_info")
    assert info.status_code == 200 and info.json()["models"] == NAMES


@pytest.mark.slow
def test_a_stream_that_waits_for_its_model_begins_with_comments(folders, monkeypatch):
    monkeypatch.setattr(router, "_SLOW", 0.1)
    monkeypatch.setattr(router, "_COMMENT_SECONDS", 0.1)
    with several(folders, fake="load_delay=1.0") as server:
        server.wait_ready()
        body = {"model": "one", "stream": True, **CHAT}
        lines = [line for line in server.http.post("/v1/chat/completions", json=body).text.splitlines() if line]
    comments = [line for line in lines if line.startswith(": ")]
    assert lines[: len(comments)] == comments and all("the model one is loading" in line for line in comments)
    shares = [int(line.split()[-1].removesuffix("%")) for line in comments if "loading weights" in line]
    assert shares == sorted(shares) and len(set(shares)) > 2
    events = [json.loads(line.removeprefix("data: ")) for line in lines[len(comments) : -1]]
    assert events[-1]["choices"][0]["finish_reason"] == "length" and lines[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_dead_engine_touches_no_other_models_stream(folders):
    with several(folders, fake="step_delay=0.02") as server:
        server.wait_ready()
        frontend = server.launcher.frontend
        server.openai.chat.completions.create(model="one", **CHAT)
        stream = server.openai.chat.completions.create(
            model="two", stream=True, **CHAT | {"max_tokens": 200}, extra_body={"ignore_eos": True}
        )
        texts = [next(stream) for _ in range(3)]
        poll(lambda: server.http.get("/load").json()["num_requests_running"] == 1)
        victim = frontend.models.models["one"]._engines.processes[0]
        os.kill(victim.pid, signal.SIGKILL)
        texts += list(stream)
        assert texts[-1].choices[0].finish_reason == "length"
        assert server.openai.chat.completions.create(model="one", **CHAT).model == "one"


@pytest.mark.slow
def test_one_budget_and_no_stream_is_cut(folders):
    with several(folders, fake="step_delay=0.01", models_memory_bytes=9 << 20) as server:
        server.wait_ready()
        models = server.launcher.frontend.models
        done, errors = [], []

        def client(number: int):
            name = NAMES[number % 3]
            try:
                stream = server.openai.chat.completions.create(
                    model=name, stream=True, **CHAT | {"max_tokens": 20}, extra_body={"ignore_eos": True}
                )
                chunks = list(stream)
                assert chunks[-1].choices[0].finish_reason == "length"
                done.append(chunks[0].model == name)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
            assert sum(model.size for model in models.models.values()) <= 9 << 20
        for thread in threads:
            thread.join(60)
        assert not errors and done == [True] * 24


@pytest.mark.slow
def test_a_model_too_large_and_one_that_cannot_load(folders, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    with several([folders[0], str(tmp_path / "broken")], models_memory_bytes=5 << 20) as server:
        server.wait_ready()
        with pytest.raises(openai.APIStatusError) as failed:
            server.openai.chat.completions.create(model="broken", **CHAT)
        assert failed.value.status_code == 503 and failed.value.code == "model_failed"
        assert str(tmp_path) not in str(failed.value) and int(failed.value.response.headers["retry-after"]) >= 1
        (card,) = (one for one in server.http.get("/v1/models").json()["data"] if one["id"] == "broken")
        assert card["status"]["failed"] and card["status"]["error"]
        assert server.openai.chat.completions.create(model="one", **CHAT).model == "one"
    with several(folders[:2], models_memory_bytes=3 << 20) as server:
        answer = server.wait_ready().http.post("/v1/chat/completions", json=CHAT | {"model": "one"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_too_large"
        assert "4.00 MiB" in answer.text and "3.00 MiB" in answer.text


@pytest.mark.slow
def test_keys_see_and_use_their_models_only(folders, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: a, key: key-of-a, models: [two]}\n  - {name: boss, key: key-of-boss, admin: true}\n"
    )
    with several(folders, api_key_file=str(keys), key_usage_file=str(tmp_path / "use.sqlite")) as server:
        server.wait_ready()
        mine = server.openai_with("key-of-a")
        assert [model.id for model in mine.models.list()] == ["two"]
        assert mine.chat.completions.create(model="two", **CHAT).model == "two"
        with pytest.raises(openai.PermissionDeniedError):
            mine.chat.completions.create(model="one", **CHAT)
        with pytest.raises(openai.NotFoundError) as unknown:
            mine.chat.completions.create(model="four", **CHAT)
        assert "'one'" not in str(unknown.value)
        assert mine.post("/chat/completions", body=CHAT, cast_to=object)["model"] == "two"
        models = server.launcher.frontend.models.models
        assert models["one"].status == "unloaded"
        asked = server.http.post("/models/load", json={"model": "two"}, headers={"authorization": "Bearer key-of-a"})
        assert asked.status_code == 403


@pytest.mark.slow
def test_batches_and_stored_responses(folders, tmp_path):
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"model": NAMES[i % 3]}}
        for i in range(6)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with several(folders, batch_dir=str(tmp_path / "batches")) as server:
        client = server.wait_ready().openai
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = poll(lambda: (found := client.batches.retrieve(batch.id)).status == "completed" and found, 60)
        out = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert {(one["custom_id"], one["response"]["body"]["model"]) for one in out} == {
            (str(i), NAMES[i % 3]) for i in range(6)
        }
        response = client.responses.create(model="two", input="hi", background=True, max_output_tokens=16)
        poll(lambda: client.responses.retrieve(response.id).status in ("completed", "incomplete"))
        assert client.responses.retrieve(response.id).model == "two"
        again = client.responses.create(model="three", input="more", previous_response_id=response.id)
        assert again.model == "three"
        poll(lambda: not server.launcher.frontend.models.models["two"].is_busy)


def test_vendors_errors_have_their_shapes(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="four", **CHAT)
    assert client.messages.create(model="three", **CHAT).model == "three"
    assert {one.id for one in client.models.list()} == set(NAMES)


@pytest.mark.slow
def test_a_pinned_model_loads_at_start(folders, tmp_path):
    listed = tmp_path / "models.yaml"
    a, b = folders[:2]
    listed.write_text(f"models:\n  - {{name: a, source: {a}, pinned: true}}\n  - {{name: b, source: {b}}}\n")
    with running_server("", models_file=str(listed), served_model_name=[], keep_alive="0") as server:
        server.wait_ready()
        poll(lambda: statuses(server) == {"a": "loaded", "b": "unloaded"})
        server.openai.chat.completions.create(model="b", **CHAT)
        poll(lambda: statuses(server) == {"a": "loaded", "b": "unloaded"})


@pytest.mark.slow
def test_what_a_name_of_the_user_adds_is_applied(folders, tmp_path, monkeypatch):
    isolated_home(tmp_path, monkeypatch)
    aliases.add("pirate", Entry(folders[0], system="Talk like a pirate.", parameters={"num_ctx": 256}))
    with several(["pirate", folders[1]], max_model_len="auto") as server:
        server.wait_ready()
        used = {
            name: server.openai.chat.completions.create(model=name, **CHAT).usage.prompt_tokens
            for name in ("pirate", "two")
        }
        assert used["pirate"] > used["two"]
        assert server.launcher.frontend.models.models["pirate"].state.config.model.max_model_len == "256"


def test_wrong_settings_are_refused(folders):
    wrong = {"one frontend": {"api_server_count": 2}, "no such folder": {"models_dir": "/nowhere"}}
    for message, settings in wrong.items():
        config = Config.from_flat(model=folders[0], models=folders[1:], port=0, **settings)

        async def start(config=config):
            ModelsLauncher(config, None, 0.0)

        with pytest.raises(ValueError, match=message):
            asyncio.run(start())
