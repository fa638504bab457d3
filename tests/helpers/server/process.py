"""Runs a server of the embedded model as a separate process, with any interpreter."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.helpers.server.running import poll

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@contextmanager
def serving(
    python: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout: float = 200,
    arguments: Sequence[str] = ("quire-tiny",),
) -> Iterator[httpx.Client]:
    """Yield a client of `PYTHON -m quire serve ARGUMENTS`, which logs to `log` and must end without an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with open(log, "w") as output:
        command = [*python, "-m", "quire", "serve", *arguments, "--port", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        poll(lambda: "ready in" in log.read_text() or server.poll() is not None, timeout)
        assert server.poll() is None, log.read_text()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False) as client:
            yield client
        server.terminate()
        assert server.wait(timeout) == 0, log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def ask(client: httpx.Client, question: str, **more: object) -> str:
    """Return the greedy answer."""
    body = {"model": "quire-tiny", "messages": [{"role": "user", "content": question}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 32} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def answers(client: httpx.Client) -> None:
    """Return the answers to a question, and to one with a JSON schema."""
    assert ask(client, "What is the capital of France?") == "The capital of France is Paris."
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    assert ask(client, "Hello", response_format=format).lstrip().startswith("{")
