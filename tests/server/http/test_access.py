"""Who may use which route: keys, allowed origins, strict parameters and priorities."""

from __future__ import annotations

import openai
import pytest

from quire.server.http.middleware import PROBES
from quire.server.routes import ROUTES
from tests.helpers.server.asking import CHAT, is_error
from tests.helpers.server.running import MODEL, running_server
from tests.server.api.test_chat import HELLO


@pytest.fixture(scope="module")
def keyed_server(model_folder):
    with running_server(
        model_folder,
        api_key=["first", "sécond"],
        allowed_origins=["http://ui.example"],
        scheduling_policy="priority",
        strict_params=True,
    ) as server:
        yield server.wait_ready()


ALL_ROUTES = [(method, route.path.replace("{model_id:path}", MODEL)) for route in ROUTES for method in route.methods]
ALL_ROUTES += [
    ("POST", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("POST", "/v1/nothing"),
    ("DELETE", CHAT),
    ("GET", "/health/"),
    ("GET", "/live/../metrics"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method,path", ALL_ROUTES)
def test_keys_guard_everything_but_the_probes(keyed_server, method, path):
    http = keyed_server.http
    wrong = [
        {},
        {"authorization": "Bearer nope"},
        {"authorization": "Bearer"},
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"x-api-key": "nope"},
        {"authorization": "Bearer first2"},
        {"authorization": "Bearer firs"},
        {"authorization": "Bearer nope", "x-api-key": "first"},
    ]
    for headers in wrong:
        answer = http.request(method, path, headers=headers)
        if path in PROBES:
            assert answer.status_code == 200
        else:
            assert (
                answer.status_code == 401
                and answer.headers["www-authenticate"] == "Bearer"
                and answer.headers["x-request-id"]
            )
            if method != "HEAD":
                assert is_error(answer, 401, "invalid_api_key")
    for headers in (
        {"authorization": "Bearer first"},
        {"authorization": "bearer first"},
        {"x-api-key": "first"},
        {"authorization": "Bearer sécond".encode()},
    ):
        assert http.request(method, path, headers=headers).status_code != 401


def test_the_sdk_understands_a_wrong_key(keyed_server):
    with keyed_server.openai_with("nope") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    with keyed_server.openai_with("first") as client:
        assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).usage.completion_tokens == 1


def test_keys_are_not_shown(keyed_server):
    answer = keyed_server.http.get("/server_info", headers={"x-api-key": "first"})
    assert answer.status_code == 403 and "first" not in answer.text  # a route of administrators


def test_origins(keyed_server, server):
    asked = {
        "origin": "http://ui.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = keyed_server.http.options(CHAT, headers=asked)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "http://ui.example"
    refused = keyed_server.http.get("/v1/models", headers={"origin": "http://ui.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://ui.example"
    assert (
        "access-control-allow-origin"
        not in keyed_server.http.get("/v1/models", headers={"origin": "http://other.example"}).headers
    )
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=asked).headers


def test_strict_parameters(keyed_server):
    answer = keyed_server.http.post(CHAT, json={"messages": HELLO, "temprature": 1}, headers={"x-api-key": "first"})
    assert is_error(answer, 400, "unknown_parameter", "temprature")


def test_priority(keyed_server, server):
    def status(running, value, in_header: bool) -> int:
        headers = {"x-api-key": "first"} | ({"x-vllm-priority": str(value)} if in_header else {})
        return running.http.post(
            CHAT,
            json={"messages": HELLO, "max_tokens": 1} | ({} if in_header else {"priority": value}),
            headers=headers,
        ).status_code

    for in_header in (False, True):
        assert [status(keyed_server, value, in_header) for value in (-5, 0, 7)] == [200, 200, 200]
        assert [status(server, value, in_header) for value in (-5, 0, 7)] == [400, 200, 400]
    assert status(keyed_server, "high", True) == status(keyed_server, 2**63, True) == 400
