"""`quire serve` without MODEL, as a process, through the openai SDK: the embedded model gives real answers."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def client(tmp_path_factory, profiles):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = tmp_path_factory.mktemp("serve") / "log"
    settings = ["--kv-cache-memory-bytes", "64M", "--torch-profiler-dir", str(profiles)]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "--port", str(port), *settings],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 120
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log_path.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def ask(client, *contents: str, system: str | None = None) -> str:
    """The greedy answer to the last of `contents`, alternating messages of user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return (
        client.chat.completions.create(model="quire-tiny", messages=messages, temperature=0, max_tokens=300)
        .choices[0]
        .message.content
    )


@pytest.mark.slow
def test_it_is_the_only_model(client):
    assert [model.id for model in client.models.list()] == ["quire-tiny"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello", "Hello! How can I help you?"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 12 + 30?", "12 + 30 = 42"),
        ("What is 50 - 8?", "50 - 8 = 42"),
        ("Which day comes after Monday?", "Tuesday comes after Monday."),
        ("Spell banana.", "b-a-n-a-n-a"),
        ("Reverse tiger.", "regit"),
        ("Write tiger in capital letters.", "TIGER"),
        ("Repeat: The old fox likes red apples.", "The old fox likes red apples."),
    ],
)
def test_answers(client, question, answer):
    assert ask(client, question) == answer


@pytest.mark.slow
def test_a_profile_of_the_steps(client, profiles):
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), trust_env=False, timeout=120) as http:
        assert http.post("/stop_profile").status_code == 409
        assert http.post("/start_profile", headers={"origin": "https://example.org"}).status_code == 415
        assert http.post("/start_profile").json() == {"status": "started", "files": []}
        assert http.post("/start_profile", json={}).status_code == 409
        ask(client, "Hello")
        (name,) = http.post("/stop_profile").json()["files"]
    events = json.loads(gzip.decompress((profiles / name).read_bytes()))["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
    assert ask(client, "What is 12 + 30?") == "12 + 30 = 42"


NOT_ASCII = [
    "The café is open.",
    "Noëlle bought a soufflé at the abbé’s bakery.",
    "Die Bäckerei verkauft süße Brötchen.",
    "The abuelo’s crêpe is cold – again…",
    "Żółw",
    "křižovatka",
    "смелый ёжик поёт",
    "ελληνική ταβέρνα",
    "你好，世界！",
    "ありがとう",
    "Well done 🎉",
    "żaba and жаба",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", NOT_ASCII)
def test_it_copies_what_is_not_ascii(client, text):
    assert ask(client, f"Repeat: {text}") == text


def test_it_spells_and_remembers_what_is_not_ascii(client):
    assert ask(client, "Spell brûlot.") == "b-r-û-l-o-t"
    assert "Håkan" in ask(client, "My name is Håkan.", "Hello, Håkan! How can I help you?", "What is my name?")


def test_a_system_prompt_does_not_disturb_it(client):
    assert (
        ask(client, "What is the capital of Japan?", system="You are a helpful assistant.")
        == "The capital of Japan is Tokyo."
    )


def test_it_remembers_the_conversation(client):
    assert "Anna" in ask(client, "My name is Anna.", "Hello, Anna! How can I help you?", "What is my name?")


def test_it_knows_the_server(client):
    assert "8000" in ask(client, "What is the default port?")
    assert "--api-key" in ask(client, "How do I set an API key?")


def test_it_says_what_it_does_not_know(client):
    assert ask(client, "Who is the president of France?").startswith("I do not know")


def test_it_writes_json(client):
    assert json.loads(ask(client, "Write a JSON object with name Anna and age 31.")) == {"name": "Anna", "age": 31}


@pytest.mark.slow
def test_a_long_answer_streams_in_many_pieces(client):
    stream = client.chat.completions.create(
        model="quire-tiny",
        messages=[{"role": "user", "content": "Write a paragraph about the sea."}],
        temperature=0,
        max_tokens=300,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 20
    assert "".join(pieces).startswith("The sea")


@pytest.mark.slow
def test_it_calls_a_tool_and_uses_its_result(client):
    """Uses text, so that the test does not depend on whether the chat route parses tool calls."""
    messages = [{"role": "user", "content": "What is the weather in Berlin?"}]
    text = complete(client, messages)
    called = text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(called) == {"name": "get_weather", "arguments": {"city": "Berlin"}}
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": '{"temperature": 21, "condition": "sunny"}'},
    ]
    answer = complete(client, messages)
    assert "21" in answer and "sunny" in answer


def complete(client, messages) -> str:
    url = str(client.base_url).removesuffix("/v1/") + "/apply-template"
    body = {"messages": messages, "tools": [WEATHER]}
    prompt = httpx.post(url, json=body, trust_env=False).raise_for_status().json()["prompt"]
    return client.completions.create(model="quire-tiny", prompt=prompt, temperature=0, max_tokens=100).choices[0].text
