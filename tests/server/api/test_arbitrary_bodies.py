"""Bodies of requests that hypothesis draws: none is the server's fault."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.helpers.server.asking import CHAT

NUMBERS = st.one_of(
    st.integers(-3, 30), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**70, 511, 512, 513]), st.floats(-3, 30)
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=6),
    st.lists(NUMBERS, max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(
        st.sampled_from(["5", "-1", "x", "include_usage", "type", "511"]),
        NUMBERS | st.booleans() | st.just("text"),
        max_size=2,
    ),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": st.text(max_size=20)}
    ),
    min_size=1,
    max_size=3,
)
FIELDS = sorted(
    {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    - {"messages", "prompt", "max_tokens", "max_completion_tokens", "model"}
)
IDS = st.lists(st.integers(0, 511), min_size=1, max_size=3)
LIKELY = {
    "n": st.integers(1, 4),
    "temperature": st.floats(0.1, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 30),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "stop": st.text(min_size=1, max_size=2) | st.just([" ", "e"]),
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=3),
    "bad_words": st.just(["a", "b c"]),
    "min_tokens": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 20),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 5, 512]),
    "truncation_side": st.sampled_from(["left", "right"]),
    "cache_salt": st.just("salt"),
    "request_id": st.just("same"),
    "top_logprobs": st.integers(0, 20),
    "best_of": st.just(1),
    "t_max_predict_ms": st.floats(0, 5000),
    "priority": st.just(0),
    "logprobs": st.booleans() | st.integers(0, 20),
    "documents": st.just([{"title": "T"}]),
    "chat_template_kwargs": st.just({"mood": 1}),
}


@st.composite
def bodies(draw) -> dict:
    """Mostly plausible bodies with a few odd values."""
    body = {"max_tokens": 3} | draw(st.sampled_from([{}, {"stream": True}]))
    odd = draw(st.sampled_from([0, 0, 1]))
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=6, unique=True)):
        body[name] = draw(VALUES if odd and draw(st.booleans()) else LIKELY.get(name, st.booleans()))
    prompts = (
        st.text(min_size=1, max_size=20)
        | st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
        | IDS
        | st.lists(IDS, min_size=1, max_size=3)
    )
    name, likely = draw(st.sampled_from([("messages", MESSAGES), ("prompt", prompts)]))
    return body | {name: draw(VALUES if odd and draw(st.booleans()) else likely)}


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies())
def test_no_body_is_the_servers_fault(server, body):
    """Every body is answered or refused with the field's name, never with 500."""
    path = CHAT if "messages" in body else "/v1/completions"
    answer = server.http.post(path, content=msgspec.json.encode(body), headers={"content-type": "application/json"})
    event(str(answer.status_code))
    if answer.status_code == 200:
        assert answer.headers["content-type"].startswith("text/event-stream") == bool(body.get("stream"))
        assert "engine_error" not in answer.text and "internal_error" not in answer.text
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] is None or error["param"].split(".")[0] in {*body, "messages", "prompt"}, error
