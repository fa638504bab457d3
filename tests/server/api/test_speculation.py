"""Several tokens per step over HTTP: the same answers, cut at the same places, and what `usage` and /metrics say."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.messages import EngineStats
from quire.server.api.anthropic import translate as anthropic
from quire.server.api.anthropic.protocol import MessagesRequest
from quire.server.api.ollama import protocol as ollama_protocol
from quire.server.api.ollama import translate as ollama
from quire.server.api.openai.responses import translate as responses
from quire.server.api.openai.responses.protocol import ResponsesRequest
from quire.server.api.textgen import sglang, tgi
from quire.server.api.textgen.protocol import TextRequest
from quire.server.metrics.stats_log import StatsLog
from tests.helpers.server.running import poll, running_server
from tests.server.api.test_chat import ask, events, post


@pytest.fixture(scope="module")
def drafting(model_folder):
    with running_server(model_folder, fake="drafts=4,wrong_drafts=0.1") as server:
        yield server.wait_ready()


def details(usage: dict) -> tuple[int | None, int | None]:
    counts = usage["completion_tokens_details"]
    return counts.get("accepted_prediction_tokens"), counts.get("rejected_prediction_tokens")


def test_answers_and_logprobs_are_the_same_and_streamed_text_is_whole(drafting):
    fields = {"max_tokens": 60, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    plain, drafted = (post(drafting, speculation=value, **fields).json() for value in (False, None))
    assert plain["choices"] == drafted["choices"] and plain["usage"] == drafted["usage"]
    assert details(drafted["usage"]) == (None, None)
    chunks = events(post(drafting, stream=True, max_tokens=60))[:-1]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == plain["choices"][0]["message"]["content"]


def test_stop_strings_cut_inside_drafts(drafting):
    whole = post(drafting, max_tokens=60, speculation=False).json()["choices"][0]["message"]["content"]
    for start in range(5, len(whole) - 3, 9):
        stop, fields = whole[start : start + 2], {"max_tokens": 60, "logprobs": True, "return_token_ids": True}
        plain, drafted = (post(drafting, stop=stop, speculation=value, **fields).json() for value in (False, True))
        assert plain["choices"] == drafted["choices"]
        assert plain["choices"][0]["finish_reason"] == "stop"
        assert plain["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"]


def test_a_prediction_is_counted(drafting):
    text = post(drafting, max_tokens=40).json()["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts, "", "something else entirely"):
        prediction = {"type": "content", "content": content}
        answer = post(drafting, max_tokens=40, prediction=prediction).json()
        assert answer["choices"][0]["message"]["content"] == text
        accepted, rejected = details(answer["usage"])
        assert accepted >= 0 and rejected >= 0 and (content or (accepted, rejected) == (0, 0))
        usage = events(
            post(drafting, max_tokens=40, prediction=prediction, stream=True, stream_options={"include_usage": True})
        )[-2]["usage"]
        assert details(usage) == (accepted, rejected)
        none = post(drafting, max_tokens=40, prediction=prediction, speculation=False).json()
        assert details(none["usage"]) == (0, 0)
    assert ask(drafting, prediction={"type": "content", "content": "x"}).usage.completion_tokens_details


def test_a_prediction_of_a_text_completion(drafting):
    fields = {"prompt": "Hello", "max_tokens": 30, "seed": 1}
    plain = drafting.http.post("/v1/completions", json=fields).json()
    prediction = {"type": "content", "content": plain["choices"][0]["text"]}
    answer = drafting.http.post("/v1/completions", json=fields | {"prediction": prediction}).json()
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert None not in details(answer["usage"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": "yes"}, "speculation"),
        ({"speculation": 1}, "speculation"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {}}, "prediction"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
    ],
)
def test_wrong_values_are_refused(drafting, fields, param):
    response = post(drafting, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param)


MESSAGES = [{"role": "user", "content": "hello"}]
DIALECTS = [  # route, a body, and how the answer is read
    ("/v1/responses", {"input": "hello"}, lambda a: a["output"][-1]["content"][0]["text"]),
    ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 20}, lambda a: a["content"][0]["text"]),
    ("/api/chat", {"model": "m", "messages": MESSAGES, "stream": False}, lambda a: a["message"]["content"]),
    ("/api/generate", {"model": "m", "prompt": "hello", "stream": False}, lambda a: a["response"]),
    ("/generate", {"inputs": "hello"}, lambda a: a["generated_text"]),
    ("/generate", {"text": "hello"}, lambda a: a["text"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "body", "text_of"), DIALECTS, ids=[f"{one[0]}-{next(iter(one[1]))}" for one in DIALECTS]
)
def test_other_dialects_have_the_switch(drafting, route, body, text_of):
    if "model" in body:
        body = body | {"model": drafting.http.get("/v1/models").json()["data"][0]["id"]}
    for value, code in ((False, 200), (True, 200), (None, 200), (1, 400), ("no", 400)):
        response = drafting.http.post(route, json=body | {"speculation": value})
        assert response.status_code == code, response.text
        assert code == 200 or "speculation" in response.text
        assert code == 400 or isinstance(text_of(response.json()), str)
    if route != "/v1/responses":
        prediction = {"type": "content", "content": "x"}
        response = drafting.http.post(route, json=body | {"prediction": prediction})
        assert response.status_code == 400 and "prediction is not supported" in response.text


def test_the_switch_of_every_dialect_reaches_the_sampling():
    def options(cls, spec, *rest, **fields):
        bodies = (msgspec.convert(fields | {"speculation": value}, cls) for value in (False, None))
        return [spec(body, *rest, request_id="a").options.speculation for body in bodies]

    one = {"model": "m", "messages": MESSAGES}
    assert options(ResponsesRequest, responses.spec, [], input="a") == [False, None]
    assert options(MessagesRequest, anthropic.spec, False, max_tokens=1, **one) == [False, None]
    assert options(ollama_protocol.ChatRequest, ollama.chat_spec, **one) == [False, None]
    assert options(ollama_protocol.GenerateRequest, ollama.generate_spec, model="m", prompt="a") == [False, None]
    assert options(TextRequest, tgi.spec, inputs="a") == options(TextRequest, sglang.spec, text="a") == [False, None]


def test_a_prediction_of_a_response(drafting):
    fields = {"input": "hello", "max_output_tokens": 40, "seed": 3}
    plain = drafting.http.post("/v1/responses", json=fields).json()
    text = plain["output"][-1]["content"][0]["text"]
    assert "accepted_prediction_tokens" not in plain["usage"]["output_tokens_details"]
    for content in (text, "", [{"type": "text", "text": text}]):
        prediction = {"type": "content", "content": content}
        answer = drafting.http.post("/v1/responses", json=fields | {"prediction": prediction}).json()
        assert answer["output"][-1]["content"][0]["text"] == text
        details = answer["usage"]["output_tokens_details"]
        counts = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert min(counts) >= 0 and (content or counts == (0, 0))
    wrong = drafting.http.post("/v1/responses", json=fields | {"prediction": {"type": "content"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("prediction")


def test_metrics(drafting):
    post(drafting, max_tokens=60)

    def counts():
        found = {}
        for line in drafting.http.get("/metrics").text.splitlines():
            if line.startswith("vllm:spec_decode_num_") and "_total{" in line:
                name, _, labels = line.removeprefix("vllm:spec_decode_num_").partition("_total{")
                place = labels.partition('position="')[2][:1]
                found[name + place] = float(line.split()[-1])
        return found

    found = poll(lambda: (got := counts())["drafts"] and got)  # the engine sends them a little later
    assert found["drafts"] <= found["draft_tokens"] and 0 < found["accepted_tokens"] < found["draft_tokens"]
    per_place = [found[f"accepted_tokens_per_pos{i}"] for i in range(4)]
    assert sum(per_place) == found["accepted_tokens"] and per_place == sorted(per_place, reverse=True)


@pytest.mark.slow
def test_the_log_has_the_acceptance_rate(caplog):
    log = StatsLog(1.0)
    log.observe(EngineStats(num_generation_tokens=9, num_drafts=2, num_draft_tokens=8, accepted_per_position=[2, 1, 1]))
    with caplog.at_level("INFO", "quire.stats"):
        log.log(1e9)
    assert "Draft acceptance rate: 50.0% of 8 tokens" in caplog.text
