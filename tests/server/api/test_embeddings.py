"""/v1/embeddings through the openai SDK and by hand, over a small random model."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array

import openai
import pytest
import torch

from quire.server.generate.pooling import special_frame
from tests.helpers.models.embedders import TEXTS, build_embedder, reference_embeddings
from tests.helpers.server.running import MODEL, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_embedder("qwen3", tmp_path_factory.mktemp("embedder") / "model")


@pytest.fixture(scope="module")
def embedder(folder):
    with running_server(folder, distributed_executor_backend="uniproc", kv_cache_memory_bytes=64 << 20) as running:
        yield running.wait_ready(120)


@pytest.fixture(scope="module")
def expected(folder):
    return reference_embeddings(folder, TEXTS)


def embed(server, given, **fields):
    extra = fields.pop("extra_body", {})
    return server.openai.embeddings.create(model=MODEL, input=given, extra_body=extra, **fields)


def vectors(answer) -> torch.Tensor:
    return torch.tensor([item.embedding for item in answer.data])


def test_the_sdk_gets_what_sentence_transformers_computes(embedder, expected):
    answer = embed(embedder, TEXTS)  # base64, which the SDK decodes
    torch.testing.assert_close(vectors(answer), expected, rtol=1e-5, atol=1e-5)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    ids = embedder.state.tokenizer.encode_batch(TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert answer.object == "list" and answer.model == MODEL and answer.data[0].object == "embedding"
    as_floats = embed(embedder, TEXTS, encoding_format="float")
    torch.testing.assert_close(vectors(as_floats), vectors(answer), rtol=0, atol=1e-6)


def test_every_form_of_input(embedder, expected):
    ids = embedder.state.tokenizer.encode_batch(TEXTS[:2])
    for given, count in [(TEXTS[0], 1), (TEXTS[:2], 2), (ids[0], 1), (ids, 2)]:
        found = vectors(embed(embedder, given, encoding_format="float"))
        torch.testing.assert_close(found, expected[:count], rtol=1e-5, atol=1e-5)


def test_base64_is_little_endian_float32(embedder, expected):
    body = embedder.http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    values = array("f", base64.b64decode(body["data"][0]["embedding"]))
    torch.testing.assert_close(torch.tensor(values), expected[0], rtol=1e-5, atol=1e-5)


def test_dimensions_are_cut_before_the_norm(embedder, expected):
    found = vectors(embed(embedder, TEXTS, dimensions=16))
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected[:, :16]), rtol=1e-5, atol=1e-5)
    raw = vectors(embed(embedder, TEXTS[:1], encoding_format="float", extra_body={"normalize": False}))
    assert raw.norm() > 2
    torch.testing.assert_close(torch.nn.functional.normalize(raw), expected[:1], rtol=1e-5, atol=1e-5)


def test_truncation_keeps_the_special_tokens(embedder, expected):
    tokenizer = embedder.state.tokenizer
    assert special_frame(tokenizer) == ([], [2])
    ids = tokenizer.encode(TEXTS[2])
    for side, cut in [("right", [*ids[:7], 2]), ("left", ids[-8:])]:
        truncated = embed(embedder, TEXTS[2], extra_body={"truncate_prompt_tokens": 8, "truncation_side": side})
        torch.testing.assert_close(vectors(truncated), vectors(embed(embedder, [cut])), rtol=1e-5, atol=1e-5)
        assert truncated.usage.prompt_tokens == 8
    long = embed(embedder, "word " * 2000, extra_body={"truncate_prompt_tokens": -1})
    assert long.usage.prompt_tokens == embedder.state.model.max_model_len


def test_many_at_once(embedder):
    async def run():
        async with embedder.aopenai() as client:
            return await asyncio.gather(
                *(client.embeddings.create(model=MODEL, input=[f"text {i}", f"text {i} again"]) for i in range(20))
            )

    for i, answer in enumerate(asyncio.run(run())):
        alone = vectors(embed(embedder, [f"text {i}", f"text {i} again"]))
        torch.testing.assert_close(vectors(answer), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", ">= 1"),
        ({"input": ""}, None, None),
        ({"input": [[]]}, "input", "must not be empty"),
        ({"input": ["a", 1]}, "input", "not a mixture"),
        ({"input": [[512]]}, "input", "between 0 and 511"),
        ({"input": "word " * 3000}, "input", "context"),
        ({"input": "a", "dimensions": 65}, "dimensions", "have 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "no room"),
        ({"input": ["a"] * 2049}, "input", "more than 2048"),
        ({}, "input", "required"),
    ],
)
def test_wrong_input(embedder, fields, param, message):
    answer = embedder.http.post("/v1/embeddings", json=fields)
    if param is None:  # the tokenizer's end token is a prompt
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and (message or "") in error["message"], error


def test_models_do_only_what_they_can(embedder, server):
    with pytest.raises(openai.BadRequestError, match="generates no text; it serves: embed"):
        embedder.openai.completions.create(model=MODEL, prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        embed(server, "Hello")
    with pytest.raises(openai.NotFoundError):
        embedder.openai.embeddings.create(model="other", input="Hello")


def test_the_deadline_of_the_header(embedder):
    answer = embedder.http.post(
        "/v1/embeddings", json={"input": ["word " * 300] * 200}, headers={"X-Request-Timeout": "0.001"}
    )
    # passed before it could begin, in the queue, or while it was computed
    assert answer.status_code in (408, 503, 504) and answer.json()["error"]["code"] == "timeout"


def test_metrics_count_the_prompts(embedder):
    before = count(embedder, "quire:prompt_tokens_total")
    answer = embed(embedder, ["one", "two"])
    assert count(embedder, "quire:prompt_tokens_total") - before == answer.usage.prompt_tokens


def count(server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_default_prompt_precedes_texts(tmp_path):
    folder = build_embedder("qwen3", tmp_path / "model", mode="mean")
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Find: "}, "default_prompt_name": "query"})
    )
    with running_server(folder, distributed_executor_backend="uniproc", kv_cache_memory_bytes=64 << 20) as running:
        found = vectors(embed(running.wait_ready(120), TEXTS))
    torch.testing.assert_close(found, reference_embeddings(folder, TEXTS), rtol=1e-5, atol=1e-5)
