"""--root-path: a server below a path of a proxy, which strips the path from requests or does not."""

from __future__ import annotations

import pytest

from tests.helpers.server.running import MODEL, running_server


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, root_path="/llm/", api_key=["secret"]) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_routes_probes_pages_and_keys(server, prefix):
    key = {"x-api-key": "secret"}
    assert server.http.get(f"{prefix}/health").status_code == 200  # without a key
    assert server.http.get(f"{prefix}/docs").status_code == 200
    assert server.http.get(f"{prefix}/", headers={"accept": "application/json"}).json()["api"] == "v1/models"
    assert server.http.get(f"{prefix}/v1/models").status_code == 401
    assert server.http.get(f"{prefix}/v1/models/{MODEL}", headers=key).json()["id"] == MODEL
    body = {"prompt": "x", "max_tokens": 2}
    assert server.http.post(f"{prefix}/v1/completions", json=body, headers=key).status_code == 200
    error = server.http.post(f"{prefix}/v1/messages", json={}, headers=key).json()
    assert error["type"] == "error"  # in the shape of the dialect that the path belongs to
    assert server.http.get(f"{prefix}/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]


def test_other_paths_are_not_stripped(server):
    key = {"x-api-key": "secret"}
    assert server.http.get("/llm", headers=key).status_code == 200  # the index
    for path in ("/llmx/v1/models", "/llm/llm/v1/models", "/x/llm/v1/models"):
        assert server.http.get(path, headers=key).status_code == 404
