"""Where texts are cut and vectors shortened by the files of sentence-transformers, against that library."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from quire.server.model_info import context_length
from tests.helpers.models.embedders import TEXTS, build_embedder, reference_embeddings
from tests.helpers.models.encoders import build_encoder
from tests.helpers.server.running import MODEL, running_server

pytestmark = pytest.mark.slow
LIMIT = 16
LONG = "The QUICK brown fox reads " * 40


def serve(folder: str, **settings):
    return running_server(folder, distributed_executor_backend="uniproc", kv_cache_memory_bytes=64 << 20, **settings)


def declare(folder: str, name: str, **settings) -> str:
    path = Path(folder, name)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = build_encoder("bert", tmp_path_factory.mktemp("limited") / "model", mode="mean")
    return declare(folder, "sentence_bert_config.json", max_seq_length=LIMIT, do_lower_case=True)


@pytest.fixture(scope="module")
def encoder(folder):
    with serve(folder) as running:
        yield running.wait_ready(120)


def embed(server, given, path="/v1/embeddings", **fields):
    return server.http.post(path, json={"model": MODEL, "input": given, **fields})


def vectors(answer) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return torch.tensor(body["embeddings"] if "embeddings" in body else [item["embedding"] for item in body["data"]])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_long_texts_and_capitals_are_read_as_sentence_transformers_does(encoder, folder, path):
    texts = [*TEXTS, LONG, LONG.lower()]
    found = vectors(embed(encoder, texts, path))
    torch.testing.assert_close(found, reference_embeddings(folder, texts), rtol=1e-5, atol=1e-5)


def test_all_that_the_model_reads_is_the_limit_of_its_files(encoder, folder):
    expected = reference_embeddings(folder, [LONG])
    answer = embed(encoder, LONG, truncate_prompt_tokens=-1)
    torch.testing.assert_close(vectors(answer), expected, rtol=1e-5, atol=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == LIMIT
    assert embed(encoder, LONG, truncate_prompt_tokens=8).json()["usage"]["prompt_tokens"] == 8
    refused = embed(encoder, LONG, truncate_prompt_tokens=LIMIT + 1)
    assert refused.status_code == 400 and f"between 1 and {LIMIT}" in refused.json()["error"]["message"]


def test_what_must_not_be_cut_is_refused(encoder):
    ids = [5] * (LIMIT + 1)
    refused = embed(encoder, [ids])
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"at most {LIMIT} tokens" in refused.json()["error"]["message"]
    assert embed(encoder, [ids[1:]]).status_code == 200
    refused = embed(encoder, LONG, "/api/embed", truncate=False)
    assert refused.status_code == 400 and f"at most {LIMIT} tokens" in refused.text


def test_every_place_tells_the_limit_of_texts(encoder):
    """Not the length of the position table, which is larger: clients size their texts by it."""
    http = encoder.http
    assert encoder.state.ready.worker.max_model_len > LIMIT
    tokens = {"model": MODEL, "prompt": "a"}
    told = {
        "/v1/models": http.get("/v1/models").json()["data"][0]["max_model_len"],
        "/v1/models/NAME": http.get(f"/v1/models/{MODEL}").json()["max_model_len"],
        "anthropic": http.get("/v1/models", headers={"anthropic-version": "1"}).json()["data"][0]["max_input_tokens"],
        "/props": http.get("/props").json()["default_generation_settings"]["n_ctx"],
        "/slots": http.get("/slots").json()[0]["n_ctx"],
        "/api/ps": http.get("/api/ps").json()["models"][0]["context_length"],
        "/api/show": http.post("/api/show", json={"model": MODEL}).json()["model_info"]["bert.context_length"],
        "/tokenize": http.post("/tokenize", json=tokens).json()["max_model_len"],
    }
    assert told == dict.fromkeys(told, LIMIT)
    for length in (LIMIT + 1, encoder.state.ready.worker.max_model_len + 1):
        for path, body in (("/v1/embeddings", {"input": [[5] * length]}), ("/pooling", {"input": [[5] * length]})):
            refused = http.post(path, json={"model": MODEL} | body)
            assert refused.status_code == 400 and f"at most {LIMIT} tokens" in refused.json()["error"]["message"]
    cut = http.post("/embed", json={"inputs": LONG})
    assert cut.json() == http.post("/embed", json={"inputs": LONG, "truncate": True}).json()
    assert f"at most {LIMIT} tokens" in http.post("/embed", json={"inputs": LONG, "truncate": False}).text


def test_a_model_that_also_generates_keeps_its_context(encoder):
    worker, pooling = encoder.state.ready.worker, encoder.state.model.pooling
    assert context_length(worker) == LIMIT
    writer = msgspec.structs.replace(worker, pooling=msgspec.structs.replace(pooling, generates=True))
    without = msgspec.structs.replace(worker, pooling=None)
    assert context_length(writer) == context_length(without) == worker.max_model_len > LIMIT


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_dimensions_of_vectors_that_cannot_be_shortened(encoder, path):
    refused = embed(encoder, "a", path, dimensions=8)
    assert refused.status_code == 400 and "dimensions must be 64" in refused.text and "--matryoshka" in refused.text
    assert vectors(embed(encoder, "a", path, dimensions=64)).shape == (1, 64)


def test_listed_sizes_and_the_flag(folder, tmp_path):
    listed = declare(build_encoder("bert", tmp_path / "m", mode="mean"), "config.json", matryoshka_dimensions=[16, 32])
    with serve(listed) as running:
        running.wait_ready(120)
        assert vectors(embed(running, "a", dimensions=16)).shape == (1, 16)
        assert "one of 16, 32" in embed(running, "a", dimensions=8).text
    with serve(folder, matryoshka=True) as running:
        assert vectors(embed(running.wait_ready(120), "a", dimensions=8)).shape == (1, 8)


def test_a_limit_of_the_tokenizer_and_its_side(tmp_path):
    folder = build_embedder("qwen3", tmp_path / "model", mode="mean")
    declare(folder, "tokenizer_config.json", model_max_length=LIMIT, truncation_side="left")
    texts = [LONG + "and ends.", TEXTS[1]]
    with serve(folder) as running:
        found = vectors(embed(running.wait_ready(120), texts))
    torch.testing.assert_close(found, reference_embeddings(folder, texts), rtol=1e-5, atol=1e-5)


def test_pairs_are_cut_as_a_cross_encoder_cuts_them(tmp_path):
    from sentence_transformers import CrossEncoder

    folder = build_encoder("bert", tmp_path / "model", "ForSequenceClassification", num_labels=1)
    pairs = [(TEXTS[0], LONG), (LONG, TEXTS[1]), (LONG, LONG), (TEXTS[1], TEXTS[1])]
    expected = CrossEncoder(folder, device="cpu", max_length=LIMIT).predict(pairs)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    Path(folder, "modules.json").write_text(json.dumps(modules))
    declare(folder, "sentence_bert_config.json", max_seq_length=LIMIT)
    with serve(folder) as running:
        first, second = map(list, zip(*pairs, strict=True))
        answer = running.wait_ready(120).http.post("/v1/score", json={"text_1": first, "text_2": second}).json()
    assert "data" in answer, answer
    found = torch.tensor([item["score"] for item in answer["data"]])
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0, -1, "256", 1.5, True, [3]])
def test_a_wrong_limit_is_refused_by_name(value, tmp_path):
    from quire.worker.models.registry import read_model_spec
    from quire.worker.transformer.pooling import read_pooling

    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    declare(folder, "sentence_bert_config.json", max_seq_length=value)
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: max_seq_length must be a whole number"):
        read_pooling(folder, read_model_spec(folder))
