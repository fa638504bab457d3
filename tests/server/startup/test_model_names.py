"""What clients see of the served model: names without paths, and facts about its files (Ollama's /api/tags, /api/show
and /api/ps), for GGUF and safetensors."""

from __future__ import annotations

import json

import gguf
import ollama
import pytest

from quire.server.routes import ROUTES
from quire.server.startup.model_details import FILE_TYPES, in_words, read_details
from quire.server.startup.model_names import default_name, without_folders
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.server.running import MODEL, running_server

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
ASK = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "Tiny-Qwen3", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def gguf_server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("of the operator")
    path = folder / "Tiny-Q8_0.gguf"
    write_gguf(checkpoint, path, {"default": "Q8_0"}, "qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: folder / "cache")
        with running_server(str(path), served_model_name=[]) as server:
            yield server.wait_ready()


@pytest.fixture(scope="module")
def folder_server(checkpoint):
    with running_server(checkpoint, served_model_name=[]) as server:
        yield server.wait_ready()


# ---- names


def test_a_name_is_the_last_part_of_a_path(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--Name-1.5" / "snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    for name in ("Model.Q4_1.gguf", "Big-00001-of-00003.gguf", "sha256-abc"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert default_name(str(tmp_path / "Model.Q4_1.gguf")) == default_name("Model.Q4_1.gguf") == "Model.Q4_1"
    assert default_name(str(tmp_path / "Big-00001-of-00003.gguf")) == "Big"
    assert default_name("./sha256-abc") == "sha256-abc"
    assert default_name(str(tmp_path) + "/") == default_name(".") == tmp_path.name
    assert default_name(str(snapshot)) == "org/Name-1.5"
    assert default_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert default_name("org/Name-GGUF:Q4_K_M") == "org/Name-GGUF:Q4_K_M"
    assert without_folders(["https://a.example", "*", str(tmp_path / "Model.Q4_1.gguf"), "/run/q.sock"]) == [
        "https://a.example",
        "*",
        "Model.Q4_1",
        "q.sock",
    ]


def test_no_answer_shows_a_path_and_the_path_is_accepted(gguf_server, folder_server):
    for server, name in ((gguf_server, "Tiny-Q8_0"), (folder_server, "Tiny-Qwen3")):
        path = server.config.model.model
        seen = ""
        for route in ROUTES:
            if route.method == "GET" and "{" not in route.path:
                seen += server.http.get(route.path).text
        chat = {"model": path, "messages": ASK, "max_tokens": 2}
        for url, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"model": path, "prompt": "x", "max_tokens": 2}),
            ("/v1/responses", {"model": path, "input": "x", "max_output_tokens": 2}),
            ("/v1/messages", chat),
            ("/api/chat", {"model": path, "messages": ASK, "stream": False, "options": {"num_predict": 2}}),
            ("/api/chat", {"model": f"{path}:latest", "messages": ASK, "options": {"num_predict": 2}}),
            ("/api/generate", {"model": path, "stream": False}),
            ("/api/show", {"model": path}),
        ):
            answer = server.http.post(url, json=body)
            assert answer.status_code in (200, 400) and "does not exist" not in answer.text, answer.text
            if answer.status_code == 200 and url != "/api/show":
                assert name in answer.text
            seen += answer.text
        card = server.http.get(f"/v1/models/{path}").json()
        assert card["id"] == name and server.http.get("/v1/models").json()["data"][0]["id"] == name
        seen += server.http.post("/v1/completions", json={"model": "none", "prompt": "x"}).text
        assert path.rpartition("/")[0] not in seen, seen[seen.find(path.rpartition("/")[0]) - 200 :][:400]


def test_a_path_is_no_name_next_to_given_names(server):
    answer = server.http.post("/v1/completions", json={"model": server.config.model.model, "prompt": "x"})
    assert answer.status_code == 404


# ---- Ollama's facts


def test_the_numbers_of_llama_cpp():
    ours = {name: number for number, name in FILE_TYPES.items()}
    theirs = {}
    for kind in gguf.LlamaFileType:
        theirs[kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")] = kind.value
    assert {name: theirs.get(name) for name in ours} == ours
    assert [in_words(n) for n in (134_515_008, 7 * 10**9, 1_543_714_304, 22_000, 5)] == [
        "134.52M",
        "7B",
        "1.5B",
        "22K",
        "5",
    ]


def test_facts_of_a_gguf_file(gguf_server):
    client = ollama.Client(host=gguf_server.url)
    (listed,), (loaded,), shown = client.list().models, client.ps().models, client.show("Tiny-Q8_0")
    for details in (listed.details, loaded.details, shown.details):
        assert (details.format, details.family, details.families) == ("gguf", "qwen3", ["qwen3"])
        assert details.quantization_level == "Q8_0"
    assert len(listed.digest) == 64 and int(listed.digest, 16) and listed.digest == loaded.digest
    assert listed.size > 100_000 and loaded.context_length == 512
    info = shown.modelinfo
    assert info["general.architecture"] == "qwen3" and info["qwen3.context_length"] == 512
    assert info["qwen3.block_count"] == 2 and info["qwen3.embedding_length"] == 256
    assert in_words(info["general.parameter_count"]) == shown.details.parameter_size
    assert info["tokenizer.ggml.tokens"] is None and "completion" in shown.capabilities


def test_facts_of_safetensors(folder_server, checkpoint):
    client = ollama.Client(host=folder_server.url)
    shown = client.show("Tiny-Qwen3:latest")
    assert (shown.details.format, shown.details.family, shown.details.quantization_level) == (
        "safetensors",
        "qwen3",
        "BF16",
    )
    info = shown.modelinfo
    assert info["qwen3.context_length"] == 512 and info["qwen3.attention.head_count"] > 0
    found = read_details(checkpoint)
    assert info["general.parameter_count"] == found.num_parameters == found.size // 2


def test_weights_that_share_a_number_are_counted_one_by_one(tmp_path):
    header = {"w": {"dtype": "I32", "shape": [8, 16], "data_offsets": [0, 512]}}
    header |= {"n": {"dtype": "F16", "shape": [10], "data_offsets": [512, 532]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(532))
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_details(str(tmp_path))
    assert (found.num_parameters, found.quantization) == (8 * 16 * 8 + 10, "AWQ")


@pytest.mark.slow
def test_version_root_and_head(server, folder_server):
    """As Visual Studio Code and Ollama's own command look for a server."""
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for accept in ("*/*", "text/plain", "application/x-ndjson"):
        assert server.http.get("/", headers={"accept": accept}).text == "Ollama is running"
    assert server.http.get("/", headers={"accept": "application/json"}).json()["message"] == "quire is running"
    for route in ROUTES:
        if route.method == "GET":
            path = route.path.replace("{model_id:path}", MODEL)
            got, head = server.http.get(path), server.http.head(path)
            assert head.status_code == got.status_code and not head.content, path
            assert head.headers.get("content-type") == got.headers.get("content-type")
    assert folder_server.http.head("/api/tags").status_code == 200
