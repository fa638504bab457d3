"""Times of requests: in the queue, until the first token, and in all."""

from __future__ import annotations

import json
import threading

import anthropic
import pytest

from tests.helpers.server.running import MODEL, poll, running_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model_folder):
    """One request at a time, 20 ms per token; a prompt needs a step per 4 tokens."""
    with running_server(
        model_folder,
        fake="step_delay=0.02",
        max_num_seqs=1,
        max_num_batched_tokens=4,
        queue_timeout=0.4,
        first_token_timeout=1.0,
        request_timeout=3.0,
        enable_prefix_caching=False,
    ) as running:
        yield running.wait_ready()


@pytest.fixture
def busy(server):
    """Somebody else's request takes the only row."""
    with server.http.stream("POST", CHAT, json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        while '"content":"' not in next(lines):
            pass
        yield
    poll(lambda: server.state.client.num_open == 0)


def error_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.slow
def test_the_queue(server, busy):
    answer = server.http.post(CHAT, json=LONG)
    assert error_of(answer) == (503, "queue_timeout") and answer.headers["retry-after"]
    assert 0.35 < answer.elapsed.total_seconds() < 2
    assert error_of(server.http.post(CHAT, json=LONG | {"timeout": 0.1})) == (503, "timeout")
    poll(lambda: server.state.client.num_open == 1)  # the other one goes on


def test_the_queue_in_a_stream(server, busy):
    text = server.http.post(CHAT, json=LONG | {"stream": True}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[0])["error"]["code"] == "queue_timeout" and events[-1] == "[DONE]"


@pytest.mark.slow
def test_the_first_token(server):
    prompt = {"prompt": "word " * 300, "max_tokens": 5}
    answer = server.http.post("/v1/completions", json=prompt)  # more steps than one second has
    assert error_of(answer) == (504, "first_token_timeout") and answer.elapsed.total_seconds() < 2.5
    assert error_of(server.http.post("/v1/completions", json=prompt | {"timeout": 0.5})) == (504, "timeout")
    poll(lambda: server.state.client.num_open == 0)
    poll(lambda: "num_requests_running" in server.http.get("/metrics").text and server.state.stats.num_running == 0)
    assert server.state.stats.kv_cache_usage == 0


@pytest.mark.slow
def test_the_whole_answer(server):
    choice = server.http.post(CHAT, json=LONG).json()["choices"][0]  # the server's time
    assert choice["finish_reason"] == "timeout" and choice["message"]["content"]
    for fields, headers in (({"timeout": 0.5}, {}), ({}, {"x-request-timeout": "0.5"}), ({"timeout": 0.5}, {})):
        answer = server.http.post(CHAT, json=LONG | fields, headers=headers)
        assert answer.json()["choices"][0]["finish_reason"] == "timeout"
        assert 0.3 < answer.elapsed.total_seconds() < 2
    events = server.http.post(CHAT, json=LONG | {"stream": True, "timeout": 0.5}).text
    assert '"finish_reason":"timeout"' in events and events.endswith("data: [DONE]\n\n")
    poll(lambda: server.state.client.num_open == 0)


@pytest.mark.slow
def test_other_dialects(server):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL, max_tokens=300, messages=HELLO, extra_body={"timeout": 0.5, "ignore_eos": True}, timeout=30
        )
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens < 100
    response = server.http.post(
        "/v1/responses", json={"input": "Hello", "max_output_tokens": 300, "timeout": 0.5, "ignore_eos": True}
    ).json()
    assert response["status"] == "incomplete"
    headers = {"x-request-timeout": "0.5"}
    options = {"num_predict": 300}
    last = server.http.post(
        "/api/chat", json={"model": MODEL, "messages": HELLO, "stream": False, "options": options}, headers=headers
    ).json()
    assert last["done_reason"] in ("length", "stop") and last["eval_count"] < 100  # it may sample its end before


BODIES = {
    CHAT: LONG,
    "/v1/completions": {"prompt": "hi", "max_tokens": 400, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 400, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 400},
    "/api/chat": {"model": MODEL, "messages": HELLO, "stream": False, "options": {"num_predict": 400}},
    "/api/generate": {"model": MODEL, "prompt": "hi", "stream": False, "options": {"num_predict": 400}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}},
    "/generate ": {"inputs": "hi", "parameters": {"max_new_tokens": 400}},
    "/invocations": LONG,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_the_field_in_every_dialect(server, path):
    answer = server.http.post(path.strip(), json=BODIES[path] | {"timeout": 0.3})
    assert answer.status_code == 200 and "timeout" not in answer.headers.get("warning", "")
    assert answer.elapsed.total_seconds() < 2
    for bad in (0, -1, "soon", [], True):
        answer = server.http.post(path.strip(), json=BODIES[path] | {"timeout": bad})
        assert answer.status_code == 400 and "timeout" in answer.text


def test_the_field_is_described(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("ChatCompletionRequest", "InfillRequest", "MessagesRequest", "EmbeddingRequest"):
        assert "timeout" in schemas[name]["properties"], name


def test_a_request_that_ends_in_time_is_left_alone(server):
    done = []
    threads = [
        threading.Thread(
            target=lambda: done.append(server.http.post(CHAT, json=LONG | {"max_tokens": 3, "timeout": 2}).json())
        )
        for _ in range(2)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one["choices"][0]["finish_reason"] for one in done] == ["length", "length"]
