"""Structures on every route that takes one, over an engine that says what the test writes."""

from __future__ import annotations

import json
import signal

import pytest

from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import CHATML

ASK = [{"role": "user", "content": "Hi"}]
NAMED = {"name": "n", "strict": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("structures"), CHATML)


@pytest.fixture(scope="module")
def closed(folder):
    with scripted_server(folder) as (server, script):
        script.says("{}")
        yield server, script


ROUTES = {
    "response_format": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": ASK,
            "response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": schema}},
        },
    ),
    "response_format.schema": (
        "/v1/chat/completions",
        lambda schema: {"messages": ASK, "response_format": {"type": "json_object", "schema": schema}},
    ),
    "structured_outputs": (
        "/v1/completions",
        lambda schema: {"prompt": "Hi", "structured_outputs": {"json": schema}},
    ),
    "guided_json, as text": (
        "/v1/completions",
        lambda schema: {"prompt": "Hi", "guided_json": json.dumps(schema)},
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {"input": "Hi", "text": {"format": {"type": "json_schema", **NAMED, "schema": schema}}},
    ),
    "ollama's chat": ("/api/chat", lambda schema: {"messages": ASK, "format": schema, "stream": False}),
    "ollama's generate": ("/api/generate", lambda schema: {"prompt": "Hi", "format": schema, "stream": False}),
    "sglang": ("/generate", lambda schema: {"text": "Hi", "sampling_params": {"json_schema": json.dumps(schema)}}),
}


def post(server, route: str, schema, **more):
    path, body = ROUTES[route]
    return server.http.post(path, json={"model": MODEL, **body(schema), **more})


def described(field: dict) -> dict:
    return {"type": "object", "properties": {"a": field}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("route", ROUTES)
def test_integers_beyond_64_bits(closed, route):
    server, script = closed
    for field in (
        {"type": "integer", "minimum": -(2**63) - 1, "maximum": 2**64},
        {"const": 10**25},
        {"enum": [2**64, -(10**30)]},
        {"type": "number", "maximum": 10**300},
        {"default": 10**400, "examples": [10**40], "type": "integer"},
    ):
        answer = post(server, route, described(field))
        assert answer.status_code == 200, answer.text
        assert script.requests[-1].sampling.grammar is not None
    for field in ({"const": 10**400}, {"minimum": 10**4000}, {"maximum": 10**400}):
        assert post(server, route, described(field)).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_waits_for_a_process_as_long_as_it_said(closed, route):
    server, _ = closed
    assert post(server, route, described({"const": f"{route} before"})).status_code == 200
    for process in server.state.structures._idle:
        process._child.send_signal(signal.SIGSTOP)
    path, body = ROUTES[route]
    schema = described({"const": f"{route} after"})
    answer = server.http.post(path, json={"model": MODEL, **body(schema)}, headers={"X-Request-Timeout": "0.2"})
    assert answer.status_code == 503
    assert "has passed" in answer.text
    assert post(server, route, schema).status_code == 200  # by a new process


@pytest.mark.parametrize("route", ROUTES)
def test_objects_are_closed_by_default(closed, route):
    server, script = closed
    assert post(server, route, {"type": "object", "properties": {"a": {}}}).status_code == 200
    assert '"additionalProperties": false' in script.requests[-1].sampling.grammar


@pytest.mark.slow
def test_a_request_and_a_server_open_objects(closed, folder):
    server, script = closed
    schema = {"type": "object", "properties": {"a": {}}}
    body = {"prompt": "Hi", "structured_outputs": {"json": schema, "additional_properties": True}}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert "additionalProperties" not in script.requests[-1].sampling.grammar
    with scripted_server(folder, additional_properties=True) as (server, script):
        script.says("{}")
        for route in ROUTES:
            assert post(server, route, schema).status_code == 200
            assert "additionalProperties" not in script.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"grammar": "root ::= foo"}, "grammar: rule 'foo' is not defined."),
        ({"ebnf": 'answer ::= "yes"'}, "ebnf: there is no rule root."),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json: at #: $ref: it refers to itself"),
        ({"guided_json": {"dependentSchemas": "x"}}, "guided_json: at #: dependentSchemas: must be an object"),
        ({"guided_json": {"type": "integer", "multipleOf": 2**31 - 1}}, "guided_json: at #: multipleOf: must be"),
    ],
)
def test_mistakes_are_named(closed, body, message):
    server, _ = closed
    answer = server.http.post("/v1/completions", json={"prompt": "Hi", **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == message.split(":")[0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"enum": [1, 2]}, "tools: parameters of f at #: no value is valid."),
        ({"type": ["object", "nonsense"]}, "tools: parameters of f at #: type: must be one of"),
    ],
)
def test_a_strict_tool_that_no_call_can_satisfy(closed, parameters, message):
    server, _ = closed
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    answer = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": ASK, "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == "tools"
