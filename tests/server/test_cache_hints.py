"""`prompt_cache_key` and `prompt_cache_retention` of every route, X-Session-ID, and DELETE /v1/cache/{key}."""

from __future__ import annotations

import pytest

from tests.server.conftest import MODEL

MESSAGES = [{"role": "user", "content": "What is kept?"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 1}},
    "/generate": {"inputs": "hi", "parameters": {"max_new_tokens": 1}},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/invocations": {"messages": MESSAGES, "max_tokens": 1},
}


def post(server, path: str, headers: dict | None = None, **fields):
    return server.http.post(path, json={"model": MODEL} | BODIES[path] | fields, headers=headers)


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_a_key_and_refuses_a_wrong_one(server, path):
    answer = post(server, path, prompt_cache_key=f"of {path}", prompt_cache_retention="24h")
    if answer.status_code != 200:
        assert "prompt_cache" not in answer.text and path == "/infill"  # a model that cannot fill in
    else:
        assert "prompt_cache" not in answer.headers.get("warning", "")
        assert server.http.delete(f"/v1/cache/of {path}").status_code == 204
        assert server.http.delete(f"/v1/cache/of {path}").status_code == 404
    wrong = [{"prompt_cache_key": value} for value in (5, ["k"], {}, True, "x" * 1025, "é" * 513)]
    wrong += [{"prompt_cache_retention": value} for value in ("1h", "", 24, [], False)]
    for fields in wrong:
        answer = post(server, path, **fields)
        assert answer.status_code == 400 and next(iter(fields)) in answer.text, fields
    for fields in ({"prompt_cache_key": None}, {"prompt_cache_key": "x" * 1024}, {"prompt_cache_retention": None}):
        assert post(server, path, **fields).status_code == 200 or path == "/infill"


def test_a_session_is_a_key(server):
    assert post(server, "/v1/completions", headers={"x-session-id": "s1"}).status_code == 200
    assert server.http.delete("/v1/cache/s1").status_code == 204
    assert post(server, "/v1/completions", headers={"x-session-id": "x" * 1025}).status_code == 400


def test_an_unknown_key_is_404(server):
    answer = server.http.delete("/v1/cache/never/seen")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "key"
