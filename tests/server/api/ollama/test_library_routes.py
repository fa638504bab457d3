"""/api/pull, /api/create, /api/copy and /api/delete with Ollama's own client, against a local Hub."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import httpx
import ollama
import pytest

from quire.checkpoints.library import aliases
from quire.checkpoints.library.entries import Entry
from quire.checkpoints.library.installed import installed
from quire.cli.main import main
from tests.helpers.library_stores import isolated_home, ollama_model
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.server.fake_hub import FakeHub
from tests.helpers.server.running import poll, running_server

NAME = "m-Q8_0.gguf"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    build_checkpoint("qwen3", folder / "plain", dtype="bfloat16")
    (folder / "gguf").mkdir()
    write_gguf(folder / "plain", folder / "gguf" / NAME, {"default": "Q8_0"}, "qwen3")
    (folder / "large").mkdir()
    (folder / "large/config.json").write_text("{}")
    (folder / "large/model.safetensors").write_bytes(os.urandom(45 << 20))
    repositories = {f"org/{name}": str(folder / name) for name in ("plain", "gguf", "large")}
    with FakeHub(repositories).running() as hub:
        hub.checksums = {NAME: hashlib.sha256((folder / "gguf" / NAME).read_bytes()).hexdigest()}
        yield hub


@pytest.fixture
def home(tmp_path, monkeypatch, hub) -> Path:
    """An empty home, for the server and the processes that it starts."""
    isolated_home(tmp_path, monkeypatch)
    for name, value in hub.environment(tmp_path / "hf").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # this process asks no Hub
    return tmp_path


@pytest.fixture
def server(home, model_folder):
    with running_server(model_folder, allow_downloads=True) as server:
        yield server.wait_ready()


@pytest.fixture
def closed(home, model_folder):
    """A server that downloads nothing."""
    with running_server(model_folder) as server:
        yield server.wait_ready()


def lines(server, path: str, body: dict) -> list[dict]:
    answer = server.http.post(path, json=body, timeout=60)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(server, path: str, body: dict, method: str = "POST", **more) -> tuple[int, str]:
    answer = server.http.request(method, path, json=body, timeout=60, **more)
    return answer.status_code, answer.json()["error"]


@pytest.mark.slow
def test_a_pull_streams_its_progress(server, hub):
    client = ollama.Client(host=server.url)
    parts = list(client.pull("hf.co/org/gguf:Q8_0", stream=True))
    size, digest = Path(hub.repositories["org/gguf"], NAME).stat().st_size, f"sha256:{hub.checksums[NAME]}"
    assert parts[0].status == "pulling manifest" and parts[-1].status == "success"
    bars = [part for part in parts if part.digest]
    assert {(bar.digest, bar.total) for bar in bars} == {(digest, size)}
    assert [bar.completed for bar in bars] == sorted(bar.completed for bar in bars)
    assert (bars[0].completed, bars[-1].completed) == (0, size)
    assert all(bar.status == f"downloading {digest[7:19]}" for bar in bars)
    assert f"org/gguf/{NAME}" in {one.name for one in installed()}
    sent = hub.sent[NAME]
    assert client.pull("org/gguf:Q8_0").status == "success" and hub.sent[NAME] == sent  # it is there
    assert server.http.post("/api/pull", json={"name": "org/plain", "stream": False}, timeout=60).json() == {
        "status": "success"
    }
    assert {"org/plain", f"org/gguf/{NAME}"} == {one.name for one in installed()}


@pytest.mark.slow
def test_errors_of_a_pull(server, hub, monkeypatch):
    client = ollama.Client(host=server.url)
    with pytest.raises(ollama.ResponseError, match="no such model on the Hugging Face Hub") as error:
        client.pull("org/none")
    assert error.value.status_code == 400 and "Looked for it" not in str(error.value)
    assert "no such model" in lines(server, "/api/pull", {"model": "org/none"})[-1]["error"]
    with pytest.raises(ollama.ResponseError, match="must name one GGUF file of its repository"):
        list(client.pull("org/gguf:Q2_K", stream=True))
    monkeypatch.setitem(hub.checksums, NAME, "0" * 64)
    assert "was damaged on its way" in refused(server, "/api/pull", {"model": "org/gguf:Q8_0", "stream": False})[1]
    for body, words in (
        ({}, "Missing required parameter: model"),
        ({"model": "/etc"}, "clients name models"),
        ({"model": "./x"}, "clients name models"),
        ({"model": "llama3.2:9b"}, "the tag 9b is not known here"),
    ):
        status, message = refused(server, "/api/pull", body)
        assert status == 400 and words in message


@pytest.mark.slow
def test_a_client_that_leaves_ends_the_download_and_the_next_continues(server, hub, monkeypatch):
    url, body, name = f"{server.url}/api/pull", {"model": "org/large"}, "model.safetensors"
    monkeypatch.setitem(hub.held, name, released := threading.Event())
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as one:
        told = one.iter_lines()  # kept: its end closes the connection
        for line in told:
            if json.loads(line).get("completed", 0) > 15 << 20:
                break
        assert server.state.pulls.num_running == 1
    poll(lambda: server.state.pulls.num_running == 0)
    poll(lambda: server.state.num_in_flight == 0)
    released.set()
    before = hub.sent[name]  # a slow machine makes the first download try again
    assert lines(server, "/api/pull", body)[-1] == {"status": "success"}
    assert hub.sent[name] - before < 0.8 * Path(hub.repositories["org/large"], name).stat().st_size
    monkeypatch.setattr(server.state.pulls, "num_running", 4)
    status, message = refused(server, "/api/pull", {"model": "org/large"})
    assert status == 503 and "4 downloads run already" in message


@pytest.mark.slow
def test_downloads_need_the_flag(closed, home, hub):
    for path, body in (
        ("/api/pull", {"model": "org/gguf"}),
        ("/api/create", {"model": "x", "from": "org/gguf:Q8_0"}),
        ("/api/create", {"model": "x", "modelfile": f"FROM {closed.state.names[0]}\nADAPTER org/lora"}),
    ):
        status, message = refused(closed, path, body)
        assert status == 403 and "start it with --allow-downloads" in message
    assert not aliases.entries() and not (home / "hf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fields", "modelfile"])
def test_create_in_both_forms(closed, home, form):
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/base/1b", b"GGUF")
    if form == "fields":
        done = ollama.Client(host=closed.url).create(
            "pirate:latest", from_="base:1b", system="Be a pirate.", parameters={"temperature": 0.5, "stop": ["x"]},
            license=["MIT"], template="{{ .Prompt }}", messages=[{"role": "user", "content": "Hi"}],
        )  # fmt: skip
        assert done.status == "success"
    else:
        text = """
            FROM base:1b
            PARAMETER temperature 0.5
            PARAMETER stop x
            SYSTEM Be a pirate.
            LICENSE MIT
            TEMPLATE {{ .Prompt }}
            MESSAGE user Hi
        """
        told = [line["status"] for line in lines(closed, "/api/create", {"name": "pirate", "modelfile": text})]
        assert told[-2:] == ["writing manifest", "success"] and any("TEMPLATE is kept" in line for line in told)
    assert aliases.find("pirate") == Entry(
        "base:1b", "Be a pirate.", "{{ .Prompt }}", {"temperature": 0.5, "stop": ["x"]}, (),
        ({"role": "user", "content": "Hi"},), ("MIT",),
    )  # fmt: skip
    assert main(["show", "pirate"]) == 1  # its base is no real file


@pytest.mark.slow
def test_create_on_the_served_model_and_on_a_name(closed, model_folder):
    served = closed.state.names[0]
    lines(closed, "/api/create", {"model": "a", "from": f"{served}:latest", "system": "Be kind."})
    assert aliases.find("a") == Entry(model_folder, "Be kind.")
    lines(closed, "/api/create", {"model": "b", "from": "a", "parameters": {"top_k": 3}})
    assert aliases.find("b") == Entry(model_folder, "Be kind.", parameters={"top_k": 3})
    assert closed.http.post("/api/copy", json={"source": "b", "destination": "c"}).status_code == 200
    assert ollama.Client(host=closed.url).copy(served, "me/d:1").status == "success"
    assert aliases.find("c") == aliases.find("b") and aliases.find("me/d:1") == Entry(model_folder)
    assert ollama.Client(host=closed.url).delete("c").status == "success" and aliases.find("c") is None


@pytest.mark.slow
def test_what_cannot_be_created_copied_or_deleted(closed, home, model_folder):
    served = closed.state.names[0]
    blob = ollama_model(home / ".ollama/models", "registry.ollama.ai/library/base/1b", b"GGUF")
    for body, words in (
        ({"model": ".", "from": served}, "cannot be a name"),
        ({"model": "x"}, "Missing required parameter: from"),
        ({"from": served}, "Missing required parameter: model"),
        ({"model": "x", "from": served, "parameters": {"top_p": 3}}, "PARAMETER top_p"),
        ({"model": "x", "from": served, "parameters": {"tempreture": 1}}, "PARAMETER tempreture is not known"),
        ({"model": "x", "from": "./model.gguf"}, "FROM: a path is taken from `quire create`"),
        ({"model": "x", "from": model_folder}, "FROM: a path is taken from `quire create`"),
        ({"model": "x", "modelfile": "hello"}, "line 1 of the Modelfile: 'hello' is no command"),
        ({"model": "x", "modelfile": f"FROM {served}\nADAPTER /etc"}, "ADAPTER: a path is taken from"),
        ({"model": "x", "from": served, "files": {"a.gguf": "sha256:0"}}, "files"),
        ({"model": "x", "path": "/x/Modelfile"}, "path"),
    ):
        status, message = refused(closed, "/api/create", body)
        assert status == 400 and words in message, (body, message)
    for source, status, words in (("none", 404, "'none' is not on this machine"), (model_folder, 400, "a path is")):
        assert (found := refused(closed, "/api/copy", {"source": source, "destination": "x"}))[0] == status
        assert words in found[1]
    for model, status, words in (
        (served, 409, "is served now"),
        ("none", 404, "none is not on this machine"),
        ("base:1b", 400, "which quire only reads"),
        (str(blob), 400, "clients name models"),
        (str(home), 400, "clients name models"),
    ):
        assert (found := refused(closed, "/api/delete", {"model": model}, "DELETE"))[0] == status, found
        assert words in found[1] and str(home) not in found[1]
    assert blob.is_file() and not aliases.entries()


@pytest.mark.slow
def test_a_download_is_deleted(server):
    ollama.Client(host=server.url).pull("org/gguf:Q8_0")
    assert ollama.Client(host=server.url).delete(f"org/gguf/{NAME}").status == "success"
    assert not installed()


@pytest.mark.slow
def test_changes_need_the_key_of_an_administrator(home, model_folder):
    calls = (
        ("POST", "/api/pull", {"model": "org/gguf"}),
        ("POST", "/api/create", {"model": "x", "modelfile": "FROM y"}),
        ("POST", "/api/copy", {"source": "x", "destination": "y"}),
        ("DELETE", "/api/delete", {"model": "x"}),
    )
    with running_server(model_folder, allow_downloads=True, api_key=["user"], admin_api_key=["boss"]) as server:
        server.wait_ready()
        for method, path, body in calls:
            for key, status in ((None, 401), ("user", 403)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert refused(server, path, body, method, headers=headers)[0] == status
            page = {"Origin": "http://evil", "x-api-key": "boss"}
            cross = server.http.request(method, path, content="{}", headers=page)
            assert cross.status_code == 415
        headers = {"Authorization": "Bearer boss"}
        served = server.state.names[0]
        done = server.http.post("/api/copy", json={"source": served, "destination": "mine"}, headers=headers)
        assert done.status_code == 200 and aliases.find("mine") == Entry(model_folder)
