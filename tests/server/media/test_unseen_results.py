"""A tool gave an image to an agent whose model reads text only: the conversation goes on, in every dialect."""

from __future__ import annotations

import base64
import re

import pytest

from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS

DATA = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()  # is never looked at
URL = f"data:image/png;base64,{DATA}"
CHAT_PART = {"type": "image_url", "image_url": {"url": URL}}
RESPONSES_PART = {"type": "input_image", "image_url": URL}
MESSAGES_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
ASK = {"role": "user", "content": "Look!"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TEXT = {"type": "text", "text": "a.png"}


def chat(part):
    result = {"role": "tool", "tool_call_id": "c", "content": [TEXT, part]}
    return {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, result]}


def responses(part):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "a.png"}, part]
    return {"input": [ASK, call, {"type": "function_call_output", "call_id": "c", "output": output}]}


def messages(part):
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, part]}
    turns = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": turns, "max_tokens": 50}


def ollama(data):
    call = {"function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "tool_name": "look", "content": "a.png", "images": [data]}
    return {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, result], "stream": False}


DIALECTS = [
    ("/v1/chat/completions", chat(CHAT_PART), {"messages": [{"role": "user", "content": [CHAT_PART]}]}),
    ("/v1/responses", responses(RESPONSES_PART), {"input": [{"role": "user", "content": [RESPONSES_PART]}]}),
    (
        "/v1/messages",
        messages(MESSAGES_PART),
        {"messages": [{"role": "user", "content": [MESSAGES_PART]}], "max_tokens": 50},
    ),
    ("/api/chat", ollama(DATA), {"messages": [ASK | {"images": [DATA]}]}),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("unseen"), QWEN3_TOOLS)) as (server, script):
        script.says("A sign.")
        yield server, script


@pytest.mark.slow
@pytest.mark.parametrize("path, result, attached", DIALECTS, ids=[path for path, *_ in DIALECTS])
def test_text_stands_for_an_image_of_a_tool(pair, path, result, attached):
    server, script = pair
    answer = server.http.post(path, json={"model": MODEL} | result)
    assert answer.status_code == 200 and "A sign." in answer.text, answer.text
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    (text,) = re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt, re.DOTALL)
    assert sorted(text.split("\n")) == ["[image: this model reads no images]", "a.png"]
    answer = server.http.post(path, json={"model": MODEL} | attached)
    assert answer.status_code == 400 and "takes no images" in answer.text
