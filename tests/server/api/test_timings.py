"""`return_timings`: llama.cpp's `timings`, by the engine's clock."""

from __future__ import annotations

import json

import pytest

from quire.engine.messages import RequestTiming, TokenCounts
from quire.server.api.openai.objects import Timings
from quire.server.generate.deltas import Choice
from quire.server.request.usage import TokenUsage
from tests.helpers.server.running import running_server

DELAY = 0.02


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, fake=f"step_delay={DELAY}") as running:
        yield running.wait_ready()


def asked(server, path: str, **fields) -> list[dict]:
    prompt = {"messages": [{"role": "user", "content": path}]} if "chat" in path else {"prompt": path}
    answer = server.http.post(path, json=prompt | {"max_tokens": 11, "ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return [answer.json()]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_they_tell_the_time_of_each_phase(server, path, stream):
    *others, last = asked(server, path, stream=stream, return_timings=True)
    assert not any("timings" in one for one in others)
    found = last["timings"]
    assert found["predicted_n"] == 11 and found["prompt_n"] + found["cache_n"] > 0
    assert found["predicted_ms"] >= 1000 * 10 * DELAY and found["prompt_ms"] > 0 and found["queued_ms"] >= 0
    assert found["predicted_per_second"] == pytest.approx(10 / (found["predicted_ms"] / 1000), rel=0.01)
    assert "draft_n" not in found
    assert not any("timings" in one for one in asked(server, path, stream=stream))


def test_an_output_in_one_piece_has_no_rate():
    usage = TokenUsage(num_prompt=5, num_output=19)
    timing = RequestTiming(1.0, 1.5, 2.0, 2.0, 0, 5)
    found = Timings.from_requests(usage, [timing])
    assert found.predicted_per_second is not found.prompt_per_second and found.prompt_per_second == 10
    assert not isinstance(found.predicted_per_second, float)


def test_drafts_are_counted():
    usage = TokenUsage(num_prompt=5)
    usage.add(Choice(0, [], [1, 2], counts=TokenCounts(accepted=3, rejected=1)))
    found = Timings.from_requests(usage, [RequestTiming(1.0, 1.5, 2.0, 3.0, 0, 5)])
    assert (found.draft_n, found.draft_n_accepted, found.predicted_per_second) == (4, 3, 1)
