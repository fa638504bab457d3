"""`prompt_cache_key` and `prompt_cache_retention` of every route, X-Session-ID, and DELETE /v1/cache/{key}."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from quire.engine.messages import NO_COUNTS
from quire.server.generate import deltas
from quire.server.request.delta import Delta
from tests.helpers.server.running import MODEL

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


VECTORS = {
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/score": {"text_1": "hi", "text_2": "a"},
    "/classify": {"input": "hi"},
    "/api/embed": {"input": "hi"},
}


@pytest.mark.parametrize("path", VECTORS)
def test_routes_with_vectors_refuse_a_wrong_key_too(server, path):
    for name, value in (("prompt_cache_key", 5), ("session_id", "x" * 1025), ("prompt_cache_retention", "1h")):
        answer = server.http.post(path, json={"model": MODEL, name: value} | VECTORS[path])
        assert answer.status_code == 400 and name in answer.text


@pytest.fixture
def sent(server, monkeypatch):
    """The requests that reach the engine."""
    requests, generate = [], server.state.client.generate

    def generate_and_note(message):
        requests.append(message)
        return generate(message)

    monkeypatch.setattr(server.state.client, "generate", generate_and_note)
    return requests


def marked(ttl: str | None) -> dict:
    return {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})


HINTS = {
    "session_id": ("/v1/chat/completions", {"session_id": "s2"}, "/s2", 600),
    "a key before a session": ("/v1/completions", {"session_id": "s2", "prompt_cache_key": "k"}, "/k", 600),
    "cache_control": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": marked(None)}]}]},
        "/",
        300,
    ),
    "of the system": (
        "/v1/messages",
        {"system": [{"type": "text", "text": "a", "cache_control": marked("1h")}], "cache_control": marked("5m")},
        "/",
        3600,
    ),
    "with a key": ("/v1/messages", {"cache_control": marked("1h"), "prompt_cache_key": "k"}, "/k", 3600),
    "keep_alive": ("/api/chat", {"keep_alive": "1h30m"}, "/", 5400),
    "seconds": ("/api/generate", {"keep_alive": 42.5}, "/", 42.5),
    "for ever": ("/api/generate", {"keep_alive": -1}, "/", 86400),
    "not at all": ("/api/chat", {"keep_alive": 0}, None, 0),
    "none": ("/v1/messages", {}, None, 0),
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_of_every_dialect_reach_the_engine(server, sent, name):
    path, fields, key, seconds = HINTS[name]
    answer = post(server, path, **fields)
    assert answer.status_code == 200 and "cache" not in answer.headers.get("warning", "")
    assert [(one.cache_key, one.cache_seconds) for one in sent] == [(key, seconds)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/generate", {"keep_alive": "5 m"}, "keep_alive"),
        ("/v1/messages", {"cache_control": marked("2h")}, "cache_control.ttl"),
        ("/v1/messages", {"system": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}, "cache_control"),
        ("/v1/completions", {"session_id": 7}, "session_id"),
    ],
)
def test_wrong_hints_are_refused(server, path, fields, param):
    answer = post(server, path, **fields)
    assert answer.status_code == 400 and param in answer.text


def test_a_chain_of_responses_is_one_conversation(server, sent):
    first = post(server, "/v1/responses").json()
    second = post(server, "/v1/responses", previous_response_id=first["id"]).json()
    post(server, "/v1/responses", previous_response_id=second["id"])
    assert [one.cache_key for one in sent] == [None, f"/{first['id']}", f"/{first['id']}"]
    assert server.http.delete(f"/v1/cache/{first['id']}").status_code == 204


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_exactly_what_was_read_and_what_created(server, stream):
    def usage(text: str, **fields) -> dict:
        block = {"type": "text", "text": text} | fields
        answer = post(server, "/v1/messages", messages=[{"role": "user", "content": [block]}], stream=stream)
        if not stream:
            return answer.json()["usage"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        return events[0]["message"]["usage"] | events[-2]["usage"]

    text = f"How much of this is cached, and how much is not? {stream} " * 3
    plain = usage(text)
    assert plain["cache_creation_input_tokens"] == 0 and "cache_creation" not in plain
    total = plain["input_tokens"] + plain["cache_read_input_tokens"]
    longer = text + "Something new, of more than one block of tokens, follows here."
    first, again = (usage(longer, cache_control=marked("1h")) for _ in range(2))
    size = server.state.ready.worker.block_size
    assert first["cache_creation_input_tokens"] > 0 and first["cache_read_input_tokens"] > 0
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": first["cache_creation_input_tokens"],
    }
    cached = first["cache_read_input_tokens"] + first["cache_creation_input_tokens"]
    assert again["cache_read_input_tokens"] == cached and again["cache_creation_input_tokens"] == 0
    counts = [sum(one[f"{n}input_tokens"] for n in ("", "cache_read_", "cache_creation_")) for one in (first, again)]
    assert counts[0] == counts[1] > total and cached == (counts[0] - 1) // size * size


class Stub:
    """A generation of two choices, which end like this."""

    def __init__(self, reasons: list[str]):
        self.request, self.client = SimpleNamespace(n=2, num_copies=1), None
        self.deltas = [Delta(i, "", [], None, None, reason, None, NO_COUNTS, None) for i, reason in enumerate(reasons)]
        self.called: list[int] = []

    def called_tools(self, index: int) -> None:
        self.called.append(index)

    def __aiter__(self):
        return self

    async def __anext__(self) -> Delta:
        if not self.deltas:
            raise StopAsyncIteration
        return self.deltas.pop(0)

    async def aclose(self) -> None:
        pass


def test_tool_calls_are_told_to_the_engine():
    async def run() -> list[tuple[int, int]]:
        stubs = [Stub(["stop", "length"]), Stub(["tool_calls", "stop"]), Stub(["stop", "tool_calls"])]
        async for _ in deltas.run(stubs):
            pass
        return [(i, index) for i, stub in enumerate(stubs) for index in stub.called]

    assert asyncio.run(run()) == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("fields", "key", "seconds"),
    [
        ({"prompt_cache_retention": "24h"}, "/", 86400),
        ({"prompt_cache_options": {"ttl": "12h"}}, "/", 43200),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "prompt_cache_key": "k"}, "/k", 1800),
        ({"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "in_memory", "session_id": "s"}, "/s", 600),
        ({"prompt_cache_retention": "in_memory"}, None, 0),
        ({"prompt_cache_options": None}, None, 0),
        ({"prompt_cache_options": {}}, None, 0),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_how_long_a_prompt_without_a_name_is_wanted(server, sent, path, fields, key, seconds):
    answer = post(server, path, **fields)
    assert answer.status_code == 200 and "warning" not in answer.headers
    assert [(one.cache_key, one.cache_seconds) for one in sent] == [(key, seconds)]


@pytest.mark.parametrize("given", ["x", 7, [1], {"ttl": 5}, {"ttl": "2h"}])
def test_a_time_that_is_not_known_is_told(server, sent, given):
    """Where `prompt_cache_options` is no parameter of the dialect, any value is."""
    paths = ["/api/generate"] + (["/v1/chat/completions"] if isinstance(given, dict) else [])
    for path in paths:
        answer = post(server, path, prompt_cache_options=given)
        assert answer.status_code == 200 and "prompt_cache_options" in answer.headers["warning"]
    assert {one.cache_seconds for one in sent} == {0}


def test_the_conversation_of_a_chain_names_what_a_retention_does_not(server, sent):
    first = post(server, "/v1/responses").json()
    post(server, "/v1/responses", previous_response_id=first["id"], prompt_cache_retention="24h")
    assert (sent[-1].cache_key, sent[-1].cache_seconds) == (f"/{first['id']}", 86400)
