"""`return_progress`: comments of the event stream that say how much of the prompt is computed."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.conftest import running_server

LONG = "word " * 150


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, fake="step_delay=0.02", max_num_batched_tokens=64) as running:
        yield running.wait_ready()


def lines(server, path: str, body: dict) -> list[str]:
    fields = {"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = server.http.post(path, json=fields | body)
    assert answer.status_code == 200, answer.text
    return [line for line in answer.text.splitlines() if line]


def told(found: list[str]) -> tuple[list[tuple[int, int]], dict]:
    """The reports, and the usage. All reports precede the first event."""
    first = next(i for i, line in enumerate(found) if line.startswith("data: "))
    reports = [re.fullmatch(r": prefill (\d+)/(\d+)", line) for line in found[:first]]
    assert not any(line.startswith(":") for line in found[first:])
    return [(int(match[1]), int(match[2])) for match in reports], json.loads(found[-2][6:])["usage"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_reports_rise_to_the_whole_prompt(server, path, n):
    text = f"{path} {n} {LONG}"
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    reports, usage = told(lines(server, path, prompt | {"return_progress": True, "n": n}))
    total = usage["prompt_tokens"]
    assert total > 128 and {whole for _, whole in reports} == {total}
    done = [done for done, _ in reports]
    assert done == sorted(set(done)) and len(done) == 3 and done[0] < 96 and done[-1] == total
    # cached blocks count as computed: the first report is beyond them
    again, usage = told(lines(server, path, prompt | {"return_progress": True}))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 64 and again[0][0] > cached and again[-1] == (total, total)


def test_several_prompts_add_up(server):
    prompts = [f"{name} {LONG}" for name in ("one", "other")]
    found = lines(server, "/v1/completions", {"prompt": prompts, "return_progress": True, "max_tokens": 1})
    total = json.loads(found[-2][6:])["usage"]["prompt_tokens"]
    done = [int(match[1]) for line in found if (match := re.fullmatch(rf": prefill (\d+)/{total}", line))]
    assert done == sorted(set(done)) and done[0] == 64 and done[-1] == total
    assert len(done) == sum(line.startswith(":") for line in found)


@pytest.mark.parametrize("asked", [{}, {"return_progress": False}])
def test_others_get_no_comments(server, asked):
    assert told(lines(server, "/v1/completions", {"prompt": f"plain {asked} {LONG}"} | asked))[0] == []


def test_it_needs_a_stream(server):
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ):
        answer = server.http.post(path, json=prompt | {"return_progress": True})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "return_progress" and "stream" in error["message"]
