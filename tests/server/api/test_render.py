"""The render routes: vLLM's fields, and a prompt that gives the answer of the request when it is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.messages import PoolingInfo
from quire.server.api.openai import render
from tests.helpers.server.running import MODEL

# of the request that vLLM 0.33 answers with
FIELDS = (
    "request_id token_ids features sampling_params model stream stream_options cache_salt priority kv_transfer_params"
)
CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "Hello there"}]}
MORE = {"model": MODEL, "max_tokens": 12, "temperature": 0.9, "seed": 7, "stop": "zz", "cache_salt": "s", "n": 2}


def rendered(server, path: str, body: dict) -> dict:
    answer = server.http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json() if path == "/v1/completions" else [answer.json()]
    assert set(FIELDS.split()) <= found.keys()
    return found


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, MESSAGES), ("/v1/completions", {"prompt": "Hello there"})])
def test_a_rendered_prompt_gives_the_answer_of_the_request(server, path, prompt):
    body = prompt | MORE
    found = rendered(server, path, body)
    assert (found["model"], found["stream"], found["cache_salt"], found["features"]) == (MODEL, False, "s", None)
    whole = server.http.post(path, json=body).json()
    assert found["count"] == len(found["token_ids"]) == whole["usage"]["prompt_tokens"]
    sent = {"model": found["model"], "prompt": found["token_ids"], "cache_salt": found["cache_salt"]}
    again = server.http.post("/v1/completions", json=sent | found["sampling_params"]).json()
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["text"] for choice in again["choices"]] == texts


def test_defaults_are_those_of_the_model_and_the_limit_fits_the_context(server):
    found = rendered(server, CHAT, MESSAGES)
    sampling = found["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["seed"], sampling["n"]) == (0.7, 20, None, 1)
    assert sampling["max_tokens"] == found["max_model_len"] - found["count"]
    assert found["request_id"].startswith("chatcmpl-") and found["priority"] == 0
    long = rendered(server, "/v1/completions", {"prompt": [5] * 1000})
    assert long["count"] == 1000 and long["sampling_params"]["max_tokens"] == 0


def test_what_the_request_would_be_refused_for_is_refused(server):
    answer = server.http.post(f"{CHAT}/render", json=MESSAGES | {"min_tokens": 9, "max_tokens": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "min_tokens"


def test_the_parameters_are_checked_once_for_all_prompts(server, monkeypatch):
    calls, found = [], render.checked
    monkeypatch.setattr(render, "checked", lambda *args: calls.append(args) or found(*args))
    body = {"prompt": [[5] * 10, [6] * 20], "max_tokens": 10_000}
    answers = server.http.post("/v1/completions/render", json=body).json()
    assert len(calls) == 1
    limits = [(one["count"], one["sampling_params"]["max_tokens"]) for one in answers]
    assert limits == [(count, answers[0]["max_model_len"] - count) for count in (10, 20)]


@pytest.mark.parametrize(
    "kind", [{"pooling": PoolingInfo(["embed"], "last", 8, generates=False)}, {"transcribes": True}]
)
def test_a_model_that_does_not_generate_has_no_parameters(server, monkeypatch, kind):
    monkeypatch.setattr(server.state, "model", replace(server.state.model, **kind))
    assert rendered(server, "/v1/completions", {"prompt": "Hello there"})["sampling_params"] is None
    assert rendered(server, CHAT, MESSAGES)["sampling_params"] is None
