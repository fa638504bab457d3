"""Routes, errors, keys, streams that end early, and server shutdown."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from quire.server.http.read_body import MIN_BODY_BYTES
from quire.server.routes import ROUTES
from tests.helpers.server.asking import CHAT, is_error
from tests.helpers.server.running import MODEL, poll, running_server
from tests.server.api.test_chat import HELLO, events
from tests.server.frontends.test_fleet import metric


def occupy(server, count: int, num_tokens: int = 400) -> list[httpx.Response]:
    """Open this many streams, which run or wait; close them to end them."""
    streams = []
    for _ in range(count):
        request = server.http.build_request(
            "POST", CHAT, json={"messages": HELLO, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        )
        streams.append(httpx.Client(timeout=30.0, trust_env=False).send(request, stream=True))
    poll(lambda: server.state.client.num_open == count)
    return streams


# ---- routes


def test_models(server):
    assert [model.id for model in server.openai.models.list()] == [MODEL, "alias"]
    model = server.openai.models.retrieve(MODEL)
    assert (model.id, model.owned_by, model.max_model_len, model.parent) == (MODEL, "quire", 512, None)
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.models.retrieve("no/such/model")
    assert caught.value.code == "model_not_found"
    assert server.http.head("/v1/models").status_code == 200


def test_models_show_no_folder_of_the_operators(server):
    assert server.config.model.model.startswith("/")
    for card in server.http.get("/v1/models").json()["data"]:
        assert card["root"] == Path(server.config.model.model).name
    assert server.config.model.model not in server.http.get("/v1/models").text


def test_tokenize_and_detokenize(server):
    answer = server.http.post(
        "/tokenize", json={"model": MODEL, "prompt": "Hello é🙂", "return_token_strs": True}
    ).json()
    ids = server.state.tokenizer.encode("Hello é🙂")
    assert answer == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": [server.state.tokenizer.vocabulary_entry(i) for i in ids],
    }
    # vocabulary entries, as vLLM has them
    assert "Ġ" in "".join(answer["token_strs"]) and not set("é🙂 ") & set("".join(answer["token_strs"]))
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello é🙂"}
    chat = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert chat["token_strs"] is None
    assert (
        server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    without = server.http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert without["count"] < chat["count"]
    # counts prompts beyond the context length, too
    assert server.http.post("/tokenize", json={"prompt": "word " * 3000}).json()["count"] > 512
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"messages": HELLO, "tools": [{}]}, "tools.0.type"),
    ):
        assert is_error(
            server.http.post("/tokenize", json=body),
            400,
            "missing_required_parameter" if param == "tools.0.type" else None,
            param,
        )
    assert is_error(server.http.post("/detokenize", json={"tokens": [512]}), 400, None, "tokens")
    assert is_error(server.http.post("/detokenize", json={"tokens": [], "model": "x"}), 404, "model_not_found", "model")


def test_health_version_and_info(server, monkeypatch):
    for path in ("/health", "/ready", "/live"):
        assert server.http.get(path).status_code == server.http.head(path).status_code == 200
    assert server.http.get("/version").json() == {"version": server.state.version}
    info = server.http.get("/server_info").json()
    assert (
        info["config"]["server"]["served_model_name"] == [MODEL, "alias"]
        and info["engine"]["max_model_len"] == 512
        and info["engine"]["plan"]["device"] == "fake"
    )
    assert info["sampling_defaults"] == {"temperature": 0.7, "top_k": 20}
    assert "max_model_len='512'" in info["vllm_config"] and "python_version" in info["system_env"]
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "/secret/log.json")
    info = server.http.get("/server_info?config_format=json").json()
    assert info["vllm_config"] == info["config"] and info["vllm_env"]["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "secret" not in str(info["vllm_env"])
    assert is_error(server.http.get("/server_info?config_format=xml"), 400, None, "config_format")


def test_reset_prefix_cache(server):
    def cached() -> int:
        message = [{"role": "user", "content": "some prompt that fills a few blocks of the cache " * 4}]
        return server.openai.chat.completions.create(
            model=MODEL, messages=message, max_tokens=1
        ).usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() > 0
    # headers that any page may send
    for headers in (
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded", "origin": "http://evil.example"},
    ):
        assert is_error(server.http.post("/reset_prefix_cache", headers=headers), 415)
    assert cached() > 0
    assert server.http.post("/reset_prefix_cache", headers={"content-type": "application/json"}).json() == {
        "success": True
    }
    assert cached() == 0
    assert server.http.post("/reset_prefix_cache", headers={"x-requested-with": "curl"}).json() == {"success": True}


def test_metrics(server):
    server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
    answer = server.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for prefix in ("quire", "vllm"):
        count = re.search(
            rf'^{prefix}:request_success_total{{.*finished_reason="length".*}} (\S+)$', answer.text, re.MULTILINE
        )
        assert count and float(count[1]) >= 1


@pytest.mark.slow
def test_openapi_describes_the_bodies(server):
    document = server.http.get("/openapi.json").json()
    assert server.http.get("/docs").status_code == 200
    for route in ROUTES:
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        assert (route.body is not None) == ("requestBody" in operation)
        assert (route.answer is not None) == (str(route.status) in operation["responses"])
        assert set(route.query) == {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}
    errors = {
        path: document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        for path in (CHAT, "/v1/messages", "/api/chat")
    }
    assert [ref.rpartition("/")[2] for ref in errors.values()] == [
        "ErrorResponse",
        "AnthropicErrorResponse",
        "OllamaErrorResponse",
    ]
    Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references and references <= set(document["components"]["schemas"])
    fields = document["components"]["schemas"]["ChatCompletionRequest"]
    assert {"messages", "temperature", "stop", "logit_bias"} <= set(fields["properties"]) and fields["required"] == [
        "messages"
    ]
    assert fields["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


# ---- errors


def test_a_route_of_posts_tells_clients_of_websockets_to_use_http(server):
    """Codex asks for a WebSocket first, and tries 405 again and again."""
    upgrade, refused = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}, set()
    for path in {route.path for route in ROUTES if route.method == "POST" and "{" not in route.path}:
        plain, answer = server.http.get(path), server.http.get(path, headers=upgrade)
        if plain.status_code == 405:
            assert answer.status_code == 426 and answer.headers["upgrade"] == "HTTP/1.1" and "POST" in answer.text
            refused.add(path)
        else:
            assert answer.status_code == plain.status_code  # a server may ignore the wish
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= refused


def test_unknown_routes_and_methods(server):
    for method, path in (
        ("GET", "/v1"),
        ("POST", "/v1/nothing"),
        ("GET", "/v1/models/"),
        ("GET", "/%0d%0aX-A:1"),
        ("GET", "/health/"),
    ):
        assert (
            server.http.request(method, path).status_code == 404
            and server.http.request(method, path).json()["error"]["message"]
        )
    for method, path in (("GET", CHAT), ("PUT", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/health")):
        answer = server.http.request(method, path)
        assert is_error(answer, 405) and "allow" in answer.headers


@pytest.mark.parametrize(
    "path,shown,meant",
    [
        ("/chat/completions", "/chat/completions", CHAT),
        ("//v1/models", "//v1/models", "/v1/models"),
        ("/v1/models/", None, "/v1/models"),
        ("/completions", "/completions", "/v1/completions"),
        ("/health/", None, "/health"),
    ],
)
def test_a_wrong_path_is_told_the_right_one(server, path, shown, meant):
    connection = http.client.HTTPConnection(*server.listener.getsockname()[:2], timeout=10)
    connection.request("GET", path)
    message = json.loads(connection.getresponse().read())["error"]["message"]
    connection.close()
    assert f"the path is {meant}." in message or (shown is None and "does not exist" in message)
    assert shown is None or f"There is no GET {shown};" in message


POSTS = [route.path for route in ROUTES if isinstance(route.body, type) and route.method == "POST"]


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_what_is_no_json_object(server, path):
    headers = {"content-type": "application/json; charset=utf-8"}
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        assert is_error(server.http.post(path, content=body, headers=headers), 400)
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        as_a_page = {"content-type": content_type, "sec-fetch-site": "cross-site"}  # programs may use Ollama's API so
        assert is_error(server.http.post(path, content=b"{}", headers=as_a_page), 415)
    assert is_error(server.http.post(path, content=b"{}", headers=headers | {"content-encoding": "br"}), 415)


def test_a_body_too_large_is_refused_before_it_is_read(server):
    with socket.create_connection((server.listener.getsockname()[0], server.listener.getsockname()[1])) as connection:
        connection.sendall(
            (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                f"{MIN_BODY_BYTES + 1}\r\n\r\n"
            ).encode()
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_too_large_is_cut_off(server):
    block = b"x" * 2**20

    def body():
        for _ in range(MIN_BODY_BYTES // len(block) + 2):
            yield block

    try:
        answer = server.http.post(CHAT, content=body(), headers={"content-type": "application/json"})
    except httpx.HTTPError:  # the server closes the connection while we still send
        return
    assert is_error(answer, 413)


def test_unknown_fields_give_a_warning(server):
    answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "temprature": 1, 'b"\r\né': 2})
    assert answer.status_code == 200
    warning = answer.headers["warning"]
    assert warning.startswith('199 quire "unknown parameters ignored: temprature, ') and warning.count('"') == 2
    assert "warning" not in server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "user": "u"}).headers


def test_the_log_names_an_unknown_field_once_and_why_a_request_was_refused(server, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "tempratur\ne": 1})
    poll(lambda: caplog.text.count("POST /v1/chat/completions") >= 3)
    assert caplog.text.count("tempratur\\ne") == 1
    server.http.post(CHAT, json={"messages": HELLO, "model": "a\nb" * 30})
    server.http.post(CHAT, json={"messages": HELLO, "temperature": 5})
    server.http.get("/no/such/route")
    lines = poll(
        lambda: (
            [
                record.getMessage()
                for record in caplog.records
                if record.name == "quire.access" and "There is no" in record.getMessage()
            ]
            and [record.getMessage() for record in caplog.records if record.name == "quire.access"]
        )
    )
    assert (
        "404" in lines[-3]
        and "invalid_request_error model: The model 'a\\nb" in lines[-3]
        and "\n" not in lines[-3]
        and len(lines[-3]) < 600
    )
    assert "400" in lines[-2] and "invalid_request_error temperature: " in lines[-2]
    assert "404" in lines[-1] and "There is no GET /no/such/route" in lines[-1]


def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours(server, caplog):
    """ClientDisconnect while a body is read: 499, without a traceback."""

    def count(status: str) -> float:
        return metric(server.http.get("/metrics").text, "http_requests_total", handler=CHAT, status=status)

    before = count("4xx"), count("5xx")
    for _ in range(3):
        with socket.create_connection(server.listener.getsockname()[:2]) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                b"application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            time.sleep(0.05)
    poll(lambda: server.state.num_in_flight == 0)
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not lines and (count("4xx") - 3, count("5xx")) == before


def test_any_name_may_be_a_template_variable(server):
    for name in ("self", "environment", "args", "variables", ""):
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {name: 1}})
        assert answer.status_code == 200, answer.text


def test_an_echo_of_a_prompt_as_long_as_the_context(server):
    ids = [5 + i % 300 for i in range(512)]
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (
        choice["prompt_token_ids"] == ids
        and choice["token_ids"] == []
        and len(choice["logprobs"]["tokens"]) == 512
        and choice["finish_reason"] == "length"
    )
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert is_error(
        server.http.post("/v1/completions", json=body | {"prompt": [*ids, 5]}), 400, "context_length_exceeded", "prompt"
    )
    assert is_error(
        server.http.post("/v1/completions", json=body | {"max_tokens": 1}), 400, "context_length_exceeded", "prompt"
    )


@pytest.mark.parametrize(
    "host,status",
    [
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("testserver", 200),
        ("quire.localhost", 200),
        ("192.168.1.5", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_a_page_that_renamed_itself_to_us_reads_nothing(server, host, status):
    answer = server.http.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert is_error(answer, 403) and "--allowed-hosts" in answer.json()["error"]["message"]
        assert server.http.get("/health", headers={"host": host}).status_code == 200  # probes reveal no details


def test_an_unexpected_exception_is_a_500_without_details(server, monkeypatch):
    monkeypatch.setattr(server.state.tokenizer, "encode_batch", lambda *args: 1 / 0, raising=False)
    answer = server.http.post(CHAT, json={"messages": HELLO})
    assert (
        is_error(answer, 500, "internal_error") and "ZeroDivision" not in answer.text and answer.headers["x-request-id"]
    )
    monkeypatch.undo()
    assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_in_the_engine_fails_alone(server, monkeypatch, stream):
    """The engine refuses a request that the server accepted: the error is the answer to that request."""
    monkeypatch.setattr("quire.server.request.sampling.fit", None)
    monkeypatch.setattr("quire.server.generate.prepare.fit", lambda sampling, *args: sampling)
    answer = server.http.post("/v1/completions", json={"prompt": [5] * 600, "stream": stream})
    if stream:
        error, done = events(answer)
        assert answer.status_code == 200 and error["error"]["type"] == "invalid_request_error" and done == "[DONE]"
    else:
        assert is_error(answer, 400, None) and answer.json()["error"]["type"] == "invalid_request_error"


# ---- ids


def test_request_ids(server):
    def answer(body: dict | None = None, **headers: str) -> httpx.Response:
        return server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1} | (body or {}), headers=headers)

    assert (
        answer(**{"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
        and answer(**{"X-Request-Id": "abc"}).json()["id"] == "chatcmpl-abc"
    )
    assert answer({"request_id": "mine"}, **{"X-Request-Id": "abc"}).headers["x-request-id"] == "mine"
    made_up = answer().headers["x-request-id"]
    assert len(made_up) == 32 and made_up != answer().headers["x-request-id"]
    for unusable in ("a b", "x" * 300, "é"):
        assert re.fullmatch(
            "[0-9a-f]{32}", answer(**{"X-Request-Id": unusable.encode("latin-1")}).headers["x-request-id"]
        )
    assert server.http.get("/nothing", headers={"x-request-id": "r"}).headers["x-request-id"] == "r"


def test_equal_request_ids_do_not_meet(slow_server):
    answers = {}

    def ask(seed: int) -> None:
        answers[seed] = slow_server.http.post(
            CHAT, json={"messages": HELLO, "max_tokens": 10, "seed": seed << 47, "request_id": "same"}
        ).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = {}
    answers, together = alone, answers
    for seed in range(4):
        ask(seed)
    assert alone == together and len(set(alone.values())) == 4


# ---- loading and shutdown


@pytest.mark.slow
def test_while_loading(model_folder):
    with running_server(model_folder, fake="load_delay=1.5") as server:
        http = server.http
        assert http.get("/live").status_code == 200
        models = http.get("/v1/models")  # from the start on
        assert models.status_code == 200 and models.json()["data"][0]["id"] == MODEL
        assert server.state.status == "ready" or models.json()["data"][0]["max_model_len"] is None
        seen = set()
        while (answer := http.get("/ready")).status_code == 503:
            body = answer.json()
            assert body["status"] == "loading" and 0 <= body["percent"] <= 100
            seen.add((body["phase"], body["percent"]))
            assert http.get("/health").status_code in (503, 200)
            refused = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
            if refused.status_code != 200:
                assert is_error(refused, 503, "model_loading") and int(refused.headers["retry-after"]) > 0
            time.sleep(0.05)
        assert len({percent for phase, percent in seen if phase == "loading weights"}) > 3
        assert http.get("/v1/models").status_code == http.get("/server_info").status_code == 200
        assert http.get("/health").json() == {"status": "ready"}


@pytest.mark.slow
def test_ending_lets_running_requests_finish(model_folder):
    with running_server(model_folder, fake="step_delay=0.01") as server:
        server.wait_ready()
        streams = occupy(server, 2, num_tokens=60)
        server.signal()
        poll(lambda: server.state.draining)
        assert server.http.get("/ready").status_code == 503 and server.http.get("/ready").json()["status"] == "draining"
        assert server.http.get("/live").status_code == 200
        assert is_error(server.http.post(CHAT, json={"messages": HELLO}), 503, "shutting_down")
        for stream in streams:
            stream.read()
            assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/live", trust_env=False)


@pytest.mark.slow
def test_ending_ends_the_rest_with_an_error_event(model_folder):
    with running_server(model_folder, fake="step_delay=0.05", shutdown_timeout=0.3) as server:
        server.wait_ready()
        streams = occupy(server, 2)
        answer = {}
        thread = threading.Thread(
            target=lambda: answer.update(whole=server.http.post(CHAT, json={"messages": HELLO, "ignore_eos": True}))
        )
        thread.start()
        poll(lambda: server.state.client.num_open == 3)
        started = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - started < 5
        for stream in streams:
            stream.read()
            *_, error, done = events(stream)
            assert error["error"]["message"] and done == "[DONE]"
        thread.join()
        assert is_error(answer["whole"], 503, "shutting_down") and "retry-after" in answer["whole"].headers
