"""A decoder, a GGUF decoder and an encoder under a budget for two: each answer equals that of a server of one model,
and a KV cache on disk survives its model's unloading.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models.embedders import build_embedder
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.server.running import poll, running_server

pytestmark = pytest.mark.slow
SETTINGS = {
    "distributed_executor_backend": None, "served_model_name": [], "max_model_len": "256", "max_num_seqs": 4,
    "num_threads": 1, "deterministic": True, "dtype": "bfloat16",
    "load_niceness": 1,
}  # fmt: skip
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def sources(checkpoint, tmp_path_factory) -> dict[str, str]:
    decoder = checkpoint("qwen3", vocab_size=512)
    file, embedder = tmp_path_factory.mktemp("several") / "file.gguf", tmp_path_factory.mktemp("embedder")
    build_embedder("qwen3", embedder)
    write_gguf(checkpoint("llama3"), file, {"default": "Q8_0"}, "llama")
    return {Path(decoder).name: decoder, "file": str(file), embedder.name: str(embedder)}


def request(names: list[str], number: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(number)
    name = names[rng.randrange(3)]
    if name == names[2]:
        return "/v1/embeddings", {"model": name, "input": f"text {number}", "encoding_format": "float"}
    prompt = [rng.randrange(30, 250) for _ in range(rng.randrange(1, 60))]
    return "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 12, "seed": 1, "temperature": 0.7}


def essence(answer: dict[str, Any]) -> object:
    if "choices" in answer:
        return [(one["text"], one["finish_reason"]) for one in answer["choices"]]
    return [round(value, 5) for value in answer["data"][0]["embedding"]]


@pytest.fixture(scope="module")
def alone(sources) -> dict[int, object]:
    """The answers of servers with one model."""
    names, found = list(sources), {}
    for name, source in sources.items():
        with running_server(source, **SETTINGS) as server:
            server.wait_ready(120)
            for number in range(NUM_REQUESTS):
                path, body = request(names, number)
                if body["model"] == name:
                    found[number] = essence(server.http.post(path, json=body).raise_for_status().json())
    return found


def test_every_answer_equals_that_of_one_model(sources, alone):
    first, *others = sources.values()
    with running_server(first, models=others, models_max=2, **SETTINGS) as server:
        server.wait_ready(120)
        models = server.launcher.frontend.models
        found, wrong, draw = {}, [], random.Random(5)

        def client(numbers: list[int]) -> None:
            for number in numbers:
                path, body = request(list(sources), number)
                answer = server.http.post(path, json=body, timeout=200)
                if answer.status_code != 200:
                    wrong.append(answer.text)
                else:
                    found[number] = essence(answer.json())

        numbers = list(range(NUM_REQUESTS))
        draw.shuffle(numbers)
        threads = [threading.Thread(target=client, args=(numbers[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert sum(model.need is not None for model in models.models.values()) <= 2
            threads[0].join(0.05)
            threads = [thread for thread in threads if thread.is_alive()] or [threading.Thread()]
        assert not wrong and found == alone


def test_a_cache_on_disk_survives_the_unloading(sources, tmp_path):
    decoder = next(iter(sources))
    body = {"model": decoder, "prompt": list(range(30, 230)), "max_tokens": 4, "temperature": 0}
    listed = tmp_path / "models.yaml"
    listed.write_text("models:\n" + "".join(f"  - {source}\n" for source in sources.values()))
    settings = SETTINGS | {"models_file": str(listed), "kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 0.1}
    with running_server("", **settings) as server:
        server.wait_ready(120)
        model = server.launcher.frontend.models.models[decoder]
        for _ in range(2):
            before = server.http.post("/v1/completions", json=body, timeout=200).json()
        server.http.post("/models/unload", json={"model": decoder})
        poll(lambda: model.status == "unloaded")
        after = server.http.post("/v1/completions", json=body, timeout=200).json()
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
