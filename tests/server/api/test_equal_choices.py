"""n choices at temperature 0 are equal, on every route that has n or best_of, and the engine computes one."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from quire.engine.messages import NO_COUNTS, EngineOutput, SamplingParams
from quire.server.generate import deltas
from quire.server.generate.deadlines import Deadlines
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
PLAIN = re.sub("</?(think|tool_call)>", "", CALL)  # without special tokens
N = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Choices that the engine computes would differ: the second says something else."""
    with scripted_server(write_folder(tmp_path_factory.mktemp("equal"), QWEN3_TOOLS)) as (server, script):
        script.says(CALL, "Something else.")
        yield server, script


def num_tokens(server, text: str) -> int:
    return len(server.state.tokenizer.encode(text, False)) + 1  # and the end of the answer


def test_chat(pair):
    server, script = pair
    fields = {"model": MODEL, "messages": ASK, "n": N, "temperature": 0, "tools": TOOLS, "logprobs": True}
    whole = server.openai.chat.completions.create(**fields)
    assert not script.requests[-1].siblings
    assert [choice.index for choice in whole.choices] == list(range(N))
    said = [
        (one.message.content, one.message.reasoning_content, one.finish_reason, one.logprobs, one.message.tool_calls[0])
        for one in whole.choices
    ]
    assert all((*one[:4], one[4].function) == (*said[0][:4], said[0][4].function) for one in said)
    assert said[0][0].strip() == "Look:" and said[0][2] == "tool_calls" and said[0][4].function.name == "time"
    assert len({one[4].id for one in said}) == N  # each call has an id of its own
    assert whole.usage.completion_tokens == N * num_tokens(server, CALL)
    assert whole.usage.prompt_tokens == len(script.requests[-1].prompt_token_ids)
    chunks = list(server.openai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    texts = {
        i: "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == i) for i in range(N)
    }
    assert texts == dict.fromkeys(range(N), said[0][0])
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == ["tool_calls"] * N


@pytest.mark.parametrize("fields", [{}, {"best_of": N}, {"best_of": N + 2}, {"temperature": 1e-6}, {"seed": 7}])
def test_completions_of_several_prompts(pair, fields):
    server, script = pair
    arguments = {"model": MODEL, "prompt": ["a", "b"], "n": N, "temperature": 0, "max_tokens": 99, "logprobs": 1}
    first = len(script.requests)
    whole = server.openai.completions.create(**arguments | fields)
    assert len(script.requests) == first + 2 and not any(one.siblings for one in script.requests[first:])
    assert [(choice.index, choice.text) for choice in whole.choices] == [(i, PLAIN) for i in range(2 * N)]
    assert all(choice.logprobs == whole.choices[0].logprobs for choice in whole.choices)
    assert whole.usage.completion_tokens == 2 * N * num_tokens(server, CALL)
    texts = [""] * (2 * N)
    for chunk in server.openai.completions.create(**arguments | fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [PLAIN] * (2 * N)


def test_choices_that_are_sampled_are_computed_each(pair):
    server, script = pair
    answer = server.openai.chat.completions.create(model=MODEL, messages=ASK, n=2, temperature=0.5)
    assert len(script.requests[-1].siblings) == 1
    assert answer.choices[1].message.content == "Something else."


def test_generate_of_sglang_and_tgi(pair):
    server, script = pair
    body = {"text": "a", "sampling_params": {"n": N, "temperature": 0, "max_new_tokens": 99}}
    whole = server.http.post("/generate", json=body).json()
    assert [one["text"] for one in whole] == [PLAIN] * N and not script.requests[-1].siblings
    events = server.http.post("/generate", json=body | {"stream": True}).text.split("\n\n")
    told = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert {one["index"]: one["text"] for one in told} == dict.fromkeys(range(N), PLAIN)
    body = {"inputs": "a", "parameters": {"best_of": N, "max_new_tokens": 99}}  # without do_sample: greedy
    assert server.http.post("/generate", json=body).json()["generated_text"] == PLAIN
    body["parameters"] |= {"do_sample": True, "temperature": 0.5}
    assert "parameters.best_of" in server.http.post("/generate", json=body).json()["error"]["message"]


def test_every_choice_of_a_real_engine(server):
    """The token ids of the engine, too; and one choice is as those of several."""
    fields = {"model": MODEL, "prompt": "Hello", "temperature": 0, "seed": 3, "max_tokens": 20}
    extra = {"return_token_ids": True}
    one, several = (server.openai.completions.create(**fields, n=n, extra_body=extra) for n in (1, 4))
    assert {tuple(choice.token_ids) for choice in several.choices} == {tuple(one.choices[0].token_ids)}
    assert several.usage.completion_tokens == 4 * one.usage.completion_tokens


class Slow:
    """A generation that says one token of its only sequence, and then nothing."""

    def __init__(self, prompt: int):
        self.request = GenerationRequest(f"r{prompt}", [5], SamplingParams(temperature=0.0), n=N)
        self.client, self.open_ids = None, []
        self.told = [Delta(0, f"a{prompt}", [70], None, None, None, None, NO_COUNTS, None)]

    def __aiter__(self):
        return self

    async def __anext__(self) -> Delta:
        if self.told:
            return self.told.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None:
        pass


def test_a_deadline_cuts_all_choices_at_the_same_place():
    async def main() -> list[deltas.Choice]:
        stream = deltas.run([Slow(0), Slow(1)], Deadlines(None, None, None, 0.2))
        return await deltas.collect(stream, 2 * N)

    choices = asyncio.run(main())
    assert [choice.text for choice in choices] == ["a0"] * N + ["a1"] * N
    assert {choice.finish_reason for choice in choices} == {"length"}


def test_an_error_of_the_only_sequence_is_that_of_the_request(pair):
    server, script = pair
    generate = script.generate

    def refuse(request):
        stream = generate(request)
        stream.outputs = [EngineOutput(request.request_id, [], "error", error="not this", error_kind="invalid_request")]
        return stream

    script.generate = refuse
    try:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "n": N, "temperature": 0})
    finally:
        del script.generate
    assert answer.status_code == 400 and "not this" in answer.text
