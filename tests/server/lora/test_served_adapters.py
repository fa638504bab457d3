"""A server with LoRA adapters: names, every dialect, loading and unloading while requests run, paths, restarts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.models.checkpoints import greedy
from tests.helpers.models.lora import as_gguf, make_adapter, merged
from tests.helpers.server.running import MODEL, running_server

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama-tied")


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """name -> folder: `one` and `two` are below --lora-dir, `given` is not, nor is `outside`."""
    base = tmp_path_factory.mktemp("adapters")
    places = {"one": base / "dir/one", "two": base / "dir/two", "given": base / "given", "outside": base / "outside"}
    for seed, place in enumerate(places.values()):
        make_adapter(place, folder, 4 + seed, seed=seed)
    (base / "dir/broken").mkdir()
    return places


@pytest.fixture(scope="module")
def expected(folder, adapters):
    """name -> greedy tokens of PROMPT; "" is the base model."""
    models = {"": merged(folder)} | {name: merged(folder, (place, 1.0)) for name, place in adapters.items()}
    return {name: greedy(model, PROMPT, 64)[0] for name, model in models.items()}


@pytest.fixture(scope="module")
def served(folder, adapters):
    with running_server(
        folder,
        distributed_executor_backend="uniproc",
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        lora_modules=[f"given={adapters['given']}"],
        lora_dir=str(adapters["one"].parent),
    ) as running:
        yield running.wait_ready(120)


def post(server, path, **body):
    return server.http.post(path, json=body)


def complete(server, model, num_tokens=NUM_TOKENS, **fields):
    answer = post(
        server, "/v1/completions",
        model=model, prompt=PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True, return_token_ids=True,
        **fields,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_models_are_listed_with_their_parent(served):
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    assert list(cards) == [MODEL, "alias", "given", "one", "two"]  # `broken` is left out
    assert cards["one"]["parent"] == MODEL and cards[MODEL]["parent"] is None
    assert served.http.get("/v1/models/two").json()["root"] == "two"
    anthropic = served.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [card["id"] for card in anthropic["data"]] == list(cards)
    assert [card["name"] for card in served.http.get("/api/tags").json()["models"]] == list(cards)


def test_the_model_of_a_request_chooses(served, expected):
    for name in ("one", "", "two", "given", "one"):
        answer = complete(served, name or MODEL)
        assert tokens(answer) == expected[name][:NUM_TOKENS] and answer["model"] == (name or MODEL)
    missing = post(served, "/v1/completions", model="three", prompt="x")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_every_dialect(served):
    """The same prompt with an adapter and without, on each route that generates."""
    messages = [{"role": "user", "content": "hello"}]
    options = {"temperature": 0, "num_predict": 12}
    routes = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 12, "temperature": 0},
        "/v1/responses": {"input": "hello", "max_output_tokens": 12, "temperature": 0, "store": False},
        "/v1/messages": {"messages": messages, "max_tokens": 12, "temperature": 0},
        "/api/chat": {"messages": messages, "options": options, "stream": False},
        "/api/generate": {"prompt": "hello", "options": options, "stream": False},
    }
    for path, body in routes.items():
        found = {name: post(served, path, model=name, **body) for name in (MODEL, "one", "two")}
        assert {answer.status_code for answer in found.values()} == {200}, (path, found["one"].text)
        texts = {name: _text(answer.json()) for name, answer in found.items()}
        assert len(set(texts.values())) == 3, (path, texts)
        assert found["one"].json()["model"] == "one"
    sglang = {"text": "hello", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    tgi = {"inputs": "hello", "parameters": {"max_new_tokens": 12}}
    assert _generated(served, sglang) != _generated(served, sglang | {"lora_path": "one"})
    adapted = tgi | {"parameters": {"max_new_tokens": 12, "adapter_id": "one"}}
    assert _generated(served, tgi) != _generated(served, adapted)
    assert post(served, "/generate", **sglang, lora_path="none").status_code == 404


def _generated(server, body):
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json().get("text") or answer.json()["generated_text"]


def _text(answer):
    """The text of an answer of any dialect."""
    match answer:
        case {"choices": [{"message": {"content": text}}]} | {"message": {"content": text}} | {"response": text}:
            return text
        case {"output": [*_, {"content": [{"text": text}, *_]}]} | {"content": [{"text": text}]}:
            return text
    raise AssertionError(answer)


def test_llamacpps_adapters(served, expected):
    listed = served.http.get("/lora-adapters").json()
    assert [(one["id"], one["name"], one["scale"]) for one in listed][:3] == [
        (0, "given", 0.0), (1, "one", 0.0), (2, "two", 0.0)
    ]  # fmt: skip
    assert tokens(complete(served, MODEL, lora=[{"id": 0, "scale": 1.0}])) == expected["given"][:NUM_TOKENS]
    assert tokens(complete(served, MODEL, lora=[{"id": 0, "scale": 0}])) == expected[""][:NUM_TOKENS]
    unknown = post(served, "/v1/completions", prompt="x", lora=[{"id": 99, "scale": 1}])
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "lora"
    assert served.http.post("/lora-adapters", json=[{"id": 1, "scale": 1.0}]).json() == {"success": True}
    try:
        assert tokens(complete(served, MODEL)) == expected["one"][:NUM_TOKENS]
        assert tokens(complete(served, MODEL, lora=[])) == expected[""][:NUM_TOKENS]
        assert tokens(complete(served, "two")) == expected["two"][:NUM_TOKENS]
        assert served.http.post("/lora-adapters", json=[{"id": 77, "scale": 1.0}]).status_code == 400
    finally:
        served.http.post("/lora-adapters", json=[])
    assert tokens(complete(served, MODEL)) == expected[""][:NUM_TOKENS]


def test_loading_and_unloading(served, folder, adapters, expected):
    place = adapters["one"].parent / "later"
    make_adapter(place, folder, 4, seed=0)
    loaded = post(served, "/v1/load_lora_adapter", lora_name="later", lora_path=str(place))
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'later' added successfully."
    shutil.rmtree(place)  # the files are not needed after loading
    assert tokens(complete(served, "later")) == expected["one"][:NUM_TOKENS]
    again = post(served, "/v1/load_lora_adapter", lora_name="later", lora_path=str(adapters["two"]))
    assert again.status_code == 409 and again.json()["error"]["param"] == "lora_name"
    taken = post(served, "/v1/load_lora_adapter", lora_name=MODEL, lora_path=str(adapters["two"]))
    assert taken.status_code == 409
    other = post(served, "/v1/load_lora_adapter", lora_name="later", lora_path=str(adapters["two"]), load_inplace=True)
    assert other.status_code == 200
    answer = complete(served, "later")
    assert tokens(answer) == expected["two"][:NUM_TOKENS]
    unloaded = post(served, "/v1/unload_lora_adapter", lora_name="later")
    assert unloaded.status_code == 200 and unloaded.text == "Success: LoRA adapter 'later' removed successfully."
    assert post(served, "/v1/completions", model="later", prompt="x").status_code == 404
    assert post(served, "/v1/unload_lora_adapter", lora_name="later").status_code == 404


def test_paths(served, adapters, tmp_path):
    link = adapters["one"].parent / "link"
    link.symlink_to(adapters["outside"])
    inner = adapters["one"].parent / "inner"
    inner.mkdir()
    shutil.copy(adapters["one"] / "adapter_config.json", inner)
    (inner / "adapter_model.safetensors").symlink_to(adapters["outside"] / "adapter_model.safetensors")
    above = adapters["one"] / ".." / "two"
    try:
        odd = ("/etc", "relative", "a\0b", f"{adapters['one']}\0")
        for path in (adapters["outside"], link, inner, above, tmp_path, tmp_path / "missing", *odd):
            refused = post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(path))
            assert refused.status_code == 403, path
            assert str(path) not in refused.text
    finally:
        link.unlink()
        shutil.rmtree(inner)
    assert post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(adapters["given"])).status_code == 200
    assert post(served, "/v1/unload_lora_adapter", lora_name="x").status_code == 200
    broken = post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(adapters["one"].parent / "broken"))
    assert broken.status_code == 400 and "there is no adapter_config.json" in broken.json()["error"]["message"]
    missing = post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(adapters["one"].parent / "missing"))
    assert missing.status_code == 400 and "lora_path: the path does not exist" in missing.json()["error"]["message"]


def test_what_is_refused_is_named(served, folder, adapters):
    """Each with its reason and no path; the server and its other adapters are as before."""
    place = adapters["one"].parent / "refused"
    cases = [
        ({"use_dora": True}, {}, "use_dora: DoRA"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: whole modules"),
        ({}, {"strength": float("nan")}, "not a number (NaN)"),
        ({}, {"rank": 65}, "rank 65, more than --max-lora-rank 64"),
        ({}, {"targets": ("lm_head",)}, "output head"),
    ]
    try:
        for config, options, reason in cases:
            make_adapter(place, folder, **{"rank": 4} | options, **config)
            refused = post(served, "/v1/load_lora_adapter", lora_name="refused", lora_path=str(place))
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "lora_path" and reason in error["message"], error
            assert str(place) not in refused.text
        (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
        refused = post(served, "/v1/load_lora_adapter", lora_name="refused", lora_path=str(place))
        assert refused.status_code == 400 and "adapter_model.bin cannot be read" in refused.text
    finally:
        shutil.rmtree(place)
    assert "refused" not in {card["id"] for card in served.http.get("/v1/models").json()["data"]}


def test_an_unload_lets_running_requests_finish(served, adapters, expected):
    place = adapters["two"]
    assert post(served, "/v1/load_lora_adapter", lora_name="gone", lora_path=str(place)).status_code == 200
    found = {}
    running = threading.Thread(target=lambda: found.update(complete(served, "gone", 64)))
    running.start()
    while served.state.client.num_open == 0 and running.is_alive():
        time.sleep(0.002)
    assert post(served, "/v1/unload_lora_adapter", lora_name="gone").status_code == 200
    assert post(served, "/v1/completions", model="gone", prompt="x").status_code == 404
    running.join(30)
    assert tokens(found) == expected["two"]


def test_metrics(served):
    complete(served, "one")
    time.sleep(0.4)
    page = served.http.get("/metrics").text
    assert 'vllm:lora_requests_info{max_lora="8"' in page


def test_a_killed_engine_continues_with_the_adapter(served, expected):
    found = {}
    running = threading.Thread(target=lambda: found.update(complete(served, "given", 64)))
    running.start()
    while served.state.client.num_open == 0 and running.is_alive():
        time.sleep(0.002)
    os.kill(served.launcher.engines.supervisors[0].engine.pid, signal.SIGKILL)
    running.join(120)
    assert tokens(found) == expected["given"]
    assert tokens(complete(served, "one")) == expected["one"][:NUM_TOKENS]


def test_adapters_of_the_hub_and_files(folder, adapters, expected, tmp_path, monkeypatch, caplog):
    """By an id, as a GGUF file, and as a GGUF file below --lora-dir; then again while the server runs. A broken one
    below --lora-dir is left out with a line in the log, as is a link that leads out.
    """
    asked = []

    def download(repository, **options):
        asked.append(repository)
        return str(adapters["outside"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    heads = merged(folder).config.num_attention_heads, merged(folder).config.num_key_value_heads
    (tmp_path / "dir" / "broken").mkdir(parents=True)
    (tmp_path / "dir" / "outward").symlink_to(adapters["two"])
    given = as_gguf(adapters["given"], tmp_path / "given.gguf", "llama", heads)
    as_gguf(adapters["two"], tmp_path / "dir" / "two.gguf", "llama", heads)
    with running_server(
        folder,
        distributed_executor_backend="uniproc",
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        lora_modules=["outside=org/outside", f"given={given}"],
        lora_dir=str(tmp_path / "dir"),
    ) as running:
        server = running.wait_ready(120)
        assert "--lora-dir: leaving out broken: there is no adapter_config.json" in caplog.text
        assert "--lora-dir: leaving out outward: a link leads out of the folder" in caplog.text
        for name in ("outside", "given", "two"):
            assert tokens(complete(server, name)) == expected[name][:NUM_TOKENS]
        for name, path in (("outside", "org/outside"), ("given", given), ("two", tmp_path / "dir" / "two.gguf")):
            assert post(server, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
            loaded = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
            assert loaded.status_code == 200, loaded.text
            assert tokens(complete(server, name)) == expected[name][:NUM_TOKENS]
        other = post(server, "/v1/load_lora_adapter", lora_name="x", lora_path="org/other")
        assert other.status_code == 403
    assert set(asked) == {"org/outside"}


def test_one_of_the_command_line_that_is_broken_fails_the_start(folder, tmp_path):
    command = [sys.executable, "-m", "quire", "serve", folder, "--port", "0", "--lora-modules", f"x={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "--lora-modules x: there is no adapter_config.json" in ended.stderr
    assert "loading weights" not in ended.stderr
