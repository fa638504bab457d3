"""openai: its parsing of schemas and tools, and its helpers for streams."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import NAME


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the current weather in a city."""

    city: str


DESCRIBE = [{"role": "user", "content": "Write a JSON object with name Anna and age 31."}]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60)


@pytest.mark.slow
def test_parse_a_schema(client):
    answer = client.chat.completions.parse(model=NAME, messages=DESCRIBE, response_format=Person, temperature=0)
    assert answer.choices[0].message.parsed == Person(name="Anna", age=31)


@pytest.mark.slow
def test_parse_a_strict_tool(client):
    answer = client.chat.completions.parse(
        model=NAME,
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_a_loop_of_tools(client):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    messages = list(ASK)
    message = (
        client.chat.completions.create(model=NAME, messages=messages, tools=[tool], temperature=0).choices[0].message
    )
    messages.append(message)
    for call in message.tool_calls:
        result = json.dumps({"temperature": 21, "sky": "sunny"})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=[tool], temperature=0).choices[0]
    assert answer.finish_reason == "stop" and "21" in answer.message.content


def test_the_stream_helper(client):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with client.chat.completions.stream(model=NAME, messages=ASK, tools=[tool], temperature=0) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    with client.chat.completions.stream(model=NAME, messages=DESCRIBE, response_format=Person, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Anna", age=31)


def test_a_cut_object_is_the_exception_that_the_client_knows(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=NAME, messages=ASK, response_format=Person, max_tokens=2)
