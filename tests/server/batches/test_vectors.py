"""Batches of embeddings, scores and ranks equal the single requests."""

from __future__ import annotations

import pytest

from tests.helpers.models.embedders import TEXTS, build_embedder
from tests.helpers.server.running import running_server
from tests.server.batches.test_batches import results, run

BODIES = {
    "/v1/embeddings": {"input": TEXTS[:2], "dimensions": 8},
    "/v1/score": {"text_1": TEXTS[0], "text_2": TEXTS[1:3]},
    "/score": {"text_1": TEXTS[0], "text_2": TEXTS[1:3]},
    "/v1/rerank": {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2},
    "/v2/rerank": {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2},
    "/rerank": {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    settings = {"distributed_executor_backend": "uniproc", "kv_cache_memory_bytes": 64 << 20}
    with running_server(build_embedder("qwen3", folder / "model"), batch_dir=str(folder / "b"), **settings) as running:
        yield running.wait_ready(120)


@pytest.mark.slow
@pytest.mark.parametrize("url", BODIES)
def test_lines_are_answered_as_requests_are(server, url):
    line = {"method": "POST", "url": url, "body": BODIES[url]}
    bad = {"method": "POST", "url": url, "body": {}}
    batch = run(server.openai, [line | {"custom_id": "good"}, bad | {"custom_id": "bad"}], endpoint=url)
    (good,) = results(server.openai, batch.output_file_id)
    alone = server.http.post(url, json=BODIES[url]).json()
    for answer in (alone, good["response"]["body"]):
        answer.pop("id"), answer.pop("created", None), answer.pop("usage")  # the prefix cache differs
    assert good["response"]["status_code"] == 200
    values, expected = (_numbers(answer) for answer in (good["response"]["body"], alone))
    assert values == pytest.approx(expected, abs=1e-5)
    assert batch.request_counts.failed == 1
    assert results(server.openai, batch.error_file_id)[0]["response"]["status_code"] == 400


@pytest.mark.slow
def test_lines_run_in_the_background(server, monkeypatch):
    sent, generate = [], server.state.client.generate
    monkeypatch.setattr(server.state.client, "generate", lambda request: sent.append(request) or generate(request))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": BODIES["/v1/embeddings"]}
    assert run(server.openai, [line], endpoint="/v1/embeddings").status == "completed"
    server.http.post("/v1/embeddings", json=BODIES["/v1/embeddings"]).raise_for_status()
    assert [request.background for request in sent] == [True, True, False, False]


def _numbers(value) -> list[float]:
    """All numbers of an answer, in order."""
    if isinstance(value, (int, float)):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for child in children for number in _numbers(child)]
