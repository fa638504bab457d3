"""`quire run MODEL PROMPT` as users of `ollama run` type it, against a server with canned answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.test_run_command import own
from tests.helpers.server.fake_openai import MODEL, FakeOpenAI
from tests.helpers.server.running import poll

pytestmark = pytest.mark.slow
ANSWER = " wörd0 wörd1 wörd2\n"


@pytest.fixture
def server():
    with FakeOpenAI() as server:
        yield server


def typed(server: FakeOpenAI, *words: str) -> list[str]:
    return [sys.executable, "-m", "quire", "run", MODEL, "--port", str(server.port), *words]


def run(command: list[str], stdin: bytes | None = b"", **more) -> subprocess.CompletedProcess:
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **given, **more)


def asked(server: FakeOpenAI) -> str:
    (message,) = server.requests[-1]["messages"]
    return message["content"]


@pytest.mark.parametrize(
    "words,stdin,prompt",
    [
        (["why is it blue?"], None, "why is it blue?"),
        (["why", "is", "it", "blue?", "--nowordwrap"], None, "why is it blue?"),  # unquoted, and a flag at the end
        (["- list three"], b"", "- list three"),
        (["--verbose", "--", "--help", "-5"], b"", "--help -5"),
        (["summarise"], "one\ntwö\n".encode(), "one\ntwö\n\nsummarise"),
        ([], b"one\r\n\r\n  two\n/bye\n", "one\r\n\r\n  two\n/bye"),  # a file is one prompt, and has no commands
        (["x"], b"\xef\xbb\xbfwith a mark\n", "with a mark\n\nx"),
        (["--think", "why?"], None, "why?"),
    ],
)
def test_the_prompt(server, words, stdin, prompt):
    done = run(typed(server, *words), stdin)
    assert done.returncode == 0 and done.stdout.decode() == ANSWER and b"\x1b" not in done.stderr, done
    assert asked(server) == prompt


def test_wrong_prompts(server):
    for words, stdin, code, said in (
        ([], b" \n", 1, "stdin has no text and no prompt is given"),
        (["x"], b"\xff\xfe\x00", 1, "stdin is not UTF-8 text (byte 0)"),
        (["x", "-q", "y"], b"", 2, "given twice"),
        (["x", "--nowrap"], b"", 2, "unknown flag --nowrap"),
        (["x", "--format", "yaml"], b"", 2, "expected json or a JSON schema"),
        (["x", "--think=much"], b"", 2, "invalid choice: 'much'"),
    ):
        done = run(typed(server, *words), stdin)
        assert done.returncode == code and said in done.stderr.decode() and not done.stdout, done
    assert not server.requests


def test_flags_of_ollama(server):
    schema = '{"type": "object"}'
    for words, field, value in (
        (["--format", "json"], "response_format", {"type": "json_object"}),
        ([f"--format={schema}"], "response_format",
         {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}),
        (["--think"], "think", True),
        (["--think=false"], "think", False),
        (["--think", "low"], "think", "low"),
    ):  # fmt: skip
        assert run(typed(server, "Hi there", *words)).returncode == 0
        assert server.requests[-1][field] == value and asked(server) == "Hi there"
    done = run(typed(server, "Hi there", "--verbose", "--keepalive", "5m", "--hidethinking"))
    said = done.stderr.decode()
    assert done.stdout.decode() == ANSWER and said.count("WARNING --keepalive: no effect: the model stays loaded") == 1
    lines = dict(line.split(":", 1) for line in said.splitlines() if " eval " in line or line.startswith("total"))
    assert lines["prompt eval count"].split() == ["2", "tokens"] and "total duration" in lines


def test_errors_of_the_server_are_on_stderr(server):
    server.fail = "status"
    done = run(typed(server, "Hi"))
    assert done.returncode == 1 and b"out of order" in done.stderr and not done.stdout
    server.fail = "stream"
    done = run(typed(server, "Hi"))
    assert done.returncode == 1 and b"the engine failed" in done.stderr and done.stdout.decode() == " wörd0\n"


def test_ctrl_c_keeps_what_came_and_ends_with_130(server):
    server.token_delay = 60.0
    with subprocess.Popen(typed(server, "Hi"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(6)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    poll(lambda: server.num_cancelled)  # the server stops, too


def test_a_reader_that_leaves_ends_it_quietly(server):
    server.token_delay = 0.01
    command = " ".join(typed(server, "Hi", "--max-tokens", "10000")) + " | head -c 8; echo ${PIPESTATUS[0]} >&2"
    done = run(["bash", "-c", command])
    assert done.stdout.decode().startswith(" wörd0") and done.stderr.split()[-1] in (b"0", b"141")
    assert b"Error" not in done.stderr and b"Traceback" not in done.stderr, done
    poll(lambda: server.num_cancelled)


def test_a_silent_pipe_is_said(server):
    """stdin of a service or an agent may be a pipe that no one closes."""
    reading, writing = os.pipe()
    process = subprocess.Popen(typed(server, "Hi"), stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert b"reading stdin to its end" in process.stderr.readline()
        os.close(writing)
        assert process.communicate(timeout=30)[0].decode() == ANSWER
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def test_nothing_of_the_worker_is_loaded(server):
    code = (
        "import sys; from quire.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = ('torch', 'numpy', 'fastapi'); "
        "wrong = [name for name in sys.modules if name.partition('.')[0] in heavy or name.startswith('quire.worker')]; "
        "sys.exit(repr(wrong) if wrong else code)"
    )
    done = run([sys.executable, "-c", code, *typed(server, "Hi")[3:]])
    assert done.returncode == 0 and done.stdout.decode() == ANSWER, done


def test_a_server_of_its_own_answers_and_ends(model_folder):
    """What the start shows goes to stderr; Ctrl-C while it answers ends it, too."""
    done = run([*own(model_folder), "--max-tokens", "4", "--keepalive", "5m", "Hi"], b"some text")
    assert done.returncode == 0 and done.stdout.strip() and b"server of this command ends with it" in done.stderr, done
    slow, pipes = os.environ | {"FAKE_EXECUTOR": "step_delay=0.05"}, {"stdout": subprocess.PIPE}
    with subprocess.Popen([*own(model_folder), "Hi"], stdin=subprocess.DEVNULL, env=slow, **pipes) as one:
        assert one.stdout.read(1)
        one.send_signal(signal.SIGINT)
        assert one.wait(30) == 130
