"""Budgets of thinking and grammars with the embedded model itself, two steps in flight. Its template opens thoughts,
which it never ends by itself.
"""

from __future__ import annotations

import json

import pytest

from quire.configs.sources import embedded_model
from tests.helpers.server.running import RunningServer, make_config, poll

pytestmark = pytest.mark.slow

ASK = [{"role": "user", "content": "Spell banana."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    folder = embedded_model()
    with open(f"{folder}/chat_template.jinja", encoding="utf-8") as file:
        template = file.read()
    opened = template.replace("'<|im_start|>assistant\\n' -}}", "'<|im_start|>assistant\\n<think>\\n' -}}")
    assert opened != template
    server = RunningServer(
        make_config(
            folder,
            distributed_executor_backend=None,
            max_model_len="1024",
            chat_template=opened,
            reasoning_parser="think",
            kv_cache_memory_bytes=2**25,
            steps_in_flight=2,
            max_num_seqs=4,
        )
    )
    poll(lambda: hasattr(server, "launcher"))
    try:
        yield server.wait_ready(60)
    finally:
        server.stop()


def ask(server, **fields):
    body = {"messages": ASK, "temperature": 0, "max_tokens": 120} | fields
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_without_a_budget_everything_is_thoughts(server):
    answer = ask(server, max_tokens=5)
    assert answer["choices"][0]["message"]["reasoning"] and answer["choices"][0]["message"]["content"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_thoughts(server, budget):
    whole = ask(server, max_tokens=30, return_token_ids=True)["choices"][0]["token_ids"]
    answer = ask(server, max_tokens=30, thinking_token_budget=budget, return_token_ids=True, ignore_eos=True)
    ids, choice = answer["choices"][0]["token_ids"], answer["choices"][0]
    forced = server.state.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    assert ids == [*whole[:budget], *forced, *ids[budget + len(forced) :]]
    assert choice["message"]["content"]
    assert choice["message"].get("reasoning", "") == server.state.tokenizer.decode(whole[:budget]).strip()


def test_budgets_of_several_choices_with_prefix_hits(server):
    answer = ask(server, n=3, temperature=1, seed=5, thinking_token_budget=5, max_tokens=40, ignore_eos=True)
    assert all(choice["message"]["content"] for choice in answer["choices"])
    details = answer["usage"]["completion_tokens_details"]
    assert 15 <= details["reasoning_tokens"] <= 18  # the forced line break counts


def test_structures_begin_after_the_thoughts(server):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    message = ask(server, thinking_token_budget=6, response_format=schema)["choices"][0]["message"]
    assert message["reasoning"] and set(json.loads(message["content"])) == {"name", "age"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_calls_after_the_thoughts(server, choice):
    answer = ask(server, thinking_token_budget=6, tools=[TOOL], tool_choice=choice)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    assert isinstance(json.loads(call["function"]["arguments"])["city"], str) and answer["message"]["reasoning"]


def test_a_structure_where_the_model_may_think_or_not(server):
    """The prompt neither opens nor closes thoughts."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for fields in ({}, {"tools": [TOOL]}, {"response_format": None, "structured_outputs": {"choice": ["yes", "no"]}}):
        body = {"add_generation_prompt": False, "response_format": schema} | fields
        message = ask(server, **body)["choices"][0]["message"]
        content = message["content"]
        if "structured_outputs" in fields:
            assert content in ("yes", "no")
        elif not message.get("tool_calls"):
            assert set(json.loads(content)) == {"name", "age"}
