"""Tests `quire chat` and `quire complete` against a server with canned answers."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from quire.cli import chat as console
from quire.cli import main as cli
from tests.helpers.server.fake_openai import MODEL, FakeOpenAI


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with FakeOpenAI() as server:
        yield server


def type_lines(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_completion_that_was_cut_is_said_to_be(server, capsys):
    assert cli.main(["complete", "--url", server.url, "-q", "x", "--max-tokens", "4"]) == 0
    assert "[stopped at 4 tokens" in capsys.readouterr().err
    assert cli.main(["complete", "--url", server.url, "-q", "x"]) == 0
    assert server.requests[-1]["max_tokens"] == console.COMPLETION_TOKENS > 16  # the API's default


def test_quick_answers_stream_to_stdout(server, capsys):
    assert (
        cli.main(
            ["complete", "--url", f"{server.url}/v1", "-q", "Once upon", "--max-tokens", "4", "--temperature", "0"]
        )
        == 0
    )
    assert capsys.readouterr().out == " wörd0 wörd1 wörd2 wörd3\n"
    assert server.requests[0] == {
        "model": MODEL,
        "prompt": "Once upon",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
    }
    assert (
        cli.main(["chat", "--url", server.url, "--quick", "Hi", "--system-prompt", "Be brief", "--model", "other"]) == 0
    )
    assert capsys.readouterr().out == " wörd0 wörd1 wörd2\n"
    assert server.requests[1] == {
        "model": "other",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "stream": True,
    }


def test_chat_knows_help_and_the_name_of_the_benchmarks_flag(server, capsys, monkeypatch):
    type_lines(monkeypatch, "/help")
    assert console.chat(["--base-url", f"{server.url}/v1"]) == 0
    # at the start, and again
    assert (said := capsys.readouterr().err).count("/help shows this") == 2 and "unknown command" not in said
    assert not server.requests


def test_chat_remembers_resets_and_changes_the_system_prompt(server, capsys, monkeypatch):
    type_lines(
        monkeypatch, "one", "two", "", "/reset", "three", "/system Be kind", "four", "/what", "/etc/passwd is a file"
    )
    assert console.chat(["--url", server.url]) == 0
    answer = {"role": "assistant", "content": " wörd0 wörd1 wörd2"}
    user = [{"role": "user", "content": text} for text in ("one", "two", "three", "four", "/etc/passwd is a file")]
    kind = {"role": "system", "content": "Be kind"}
    assert [request["messages"] for request in server.requests] == [
        [user[0]],
        [user[0], answer, user[1]],
        [user[2]],
        [kind, user[3]],
        [kind, user[3], answer, user[4]],
    ]
    assert "unknown command /what" in capsys.readouterr().err


def test_set_changes_the_fields_of_requests(server, capsys, monkeypatch):
    type_lines(
        monkeypatch,
        "/set temperature 0.2",
        "/set parameter num_predict 7",
        '/set stop ["a", "b"]',
        "/set reasoning_effort low",
        "one",
        "/set temperature",
        "/set",
        "/set messages []",
        "two",
        "/bye",
        "three",
    )
    assert console.chat(["--url", server.url]) == 0
    first, second = [{k: v for k, v in one.items() if k not in ("messages", "stream")} for one in server.requests]
    assert first == {"model": MODEL, "max_tokens": 7, "stop": ["a", "b"], "reasoning_effort": "low", "temperature": 0.2}
    assert second == {k: v for k, v in first.items() if k != "temperature"}
    said = capsys.readouterr().err
    assert "error: /set: messages is set by the conversation itself" in said and said.count("[stopped at 7 tokens") == 2


def test_messages_of_several_lines(server, monkeypatch):
    lines = [
        '"""first',
        "",
        "  second",
        '"""',
        "a\\",
        "b",
        '"""one"""',
        "/path/x.py",
        'is """not""" one',
        '"""never',
        "closed",
    ]
    type_lines(monkeypatch, *lines)
    assert console.chat(["--url", server.url]) == 0
    asked = [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "user"]
    assert asked == ["first\n\n  second", "a\nb", "one", "/path/x.py", 'is """not""" one', "never\nclosed"]


def test_errors_end_quick_calls_and_not_conversations(server, capsys, monkeypatch):
    server.fail = "status"
    assert console.complete(["--url", server.url, "-q", "x"]) == 1
    assert "quire complete: error: HTTP 500: out of order" in capsys.readouterr().err
    server.fail = "stream"
    type_lines(monkeypatch, "one", "two")
    assert console.chat(["--url", server.url]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("error: the engine failed") == 2
    # the failed question is not part of the conversation
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "two"}]


def test_no_server_wrong_url_and_wrong_key(capsys, monkeypatch):
    assert console.chat(["--url", "http://127.0.0.1:1/v1", "-q", "x"]) == 1
    assert "http://127.0.0.1:1/v1: [Errno 111]" in capsys.readouterr().err
    assert console.chat(["--url", "ftp://x", "-q", "x"]) == 1
    assert "--url: expected http://HOST:PORT/v1" in capsys.readouterr().err
    with FakeOpenAI(api_key="secret") as guarded:
        assert console.complete(["--url", guarded.url, "-q", "x", "--api-key", "guess"]) == 1
        assert "HTTP 401: wrong key" in capsys.readouterr().err
        monkeypatch.setenv("QUIRE_API_KEY", "secret,other")
        assert console.complete(["--url", guarded.url, "-q", "x"]) == 0


def read_until(terminal: int, pattern: str, seconds: float = 20.0) -> str:
    """The output of the program until `pattern` appears."""
    text, end = "", time.monotonic() + seconds
    while not re.search(pattern, text):
        assert time.monotonic() < end, f"no {pattern!r} in {text!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends():
    with FakeOpenAI(token_delay=0.05) as server:
        terminal, child_side = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "chat", "--url", server.url, "--max-tokens", "1000"],
            stdin=child_side,
            stdout=child_side,
            stderr=child_side,
            start_new_session=True,
        )
        os.close(child_side)
        try:
            read_until(terminal, "> ")
            os.write(terminal, b"go on\n")
            read_until(terminal, "wörd3")
            process.send_signal(signal.SIGINT)
            read_until(terminal, r"\[stopped\]\s+> ")
            os.write(terminal, b"again\n")
            read_until(terminal, "wörd1")
            process.send_signal(signal.SIGINT)
            read_until(terminal, r"\[stopped\]\s+> ")
            os.write(terminal, b"\x04")
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
        _, second = server.requests
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
        assert (
            second["messages"][1]["content"].startswith(" wörd0 wörd1 wörd2 wörd3")
            and len(second["messages"][1]["content"]) < 1000
        )
        assert server.num_cancelled == 2  # the server noticed that the client disconnected


def test_thoughts_go_to_stderr(capsys):
    class Thinking:
        def stream(self, path, body):
            for delta in ({"role": "assistant"}, {"reasoning_content": "hm"}, {"reasoning": "m"}, {"content": "So."}):
                yield {"choices": [{"index": 0, "delta": delta}]}

    conversation = console.Conversation(Thinking(), {})
    conversation.ask("Why?")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("So.\n", "hmm\n\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "So."}
