"""`quire run`: finds the server of the model or starts one, and ends what it started, however it ends itself."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.test_console import read_until
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.running import MODEL, poll
from tests.server.http.test_tls import certificate
from tests.server.test_launch import free_port, gone

pytestmark = pytest.mark.slow


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "quire", "run", *arguments]


def own(folder: str, *arguments: str) -> list[str]:
    """The command for a server of its own: nothing listens on the port of the settings."""
    fake = ("--distributed-executor-backend", BACKEND, "--max-model-len", "512", "--port", str(free_port()))
    return command(folder, *fake, *arguments)


def run(arguments: list[str], text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_one_answer_by_a_server_of_its_own(model_folder):
    before = {process.pid for process in psutil.process_iter()}
    result = run(own(model_folder, "-q", "Hi", "--max-tokens", "4"))
    assert result.returncode == 0 and result.stdout.strip(), result
    assert "using the server" not in result.stderr and "[stopped at 4 tokens" in result.stderr
    for process in psutil.process_iter(["pid", "cmdline"]):  # no command line: it has ended
        assert process.info["pid"] in before or model_folder not in " ".join(process.info["cmdline"] or ())


def test_a_running_server_is_used(server, model_folder):
    port = str(server.listener.getsockname()[1])
    num_before = len(server.state.names)
    for model in ([], [MODEL], ["alias"]):
        result = run(command(*model, "--port", port, "--max-tokens", "3"), "Hi\n")
        assert result.returncode == 0 and f"using the server at http://127.0.0.1:{port}" in result.stderr, result
        assert result.stdout.strip() and result.stderr.count("[stopped at 3 tokens") == 1
    assert len(server.state.names) == num_before and server.state.status == "ready"
    other = run(command("no/such-model", "--url", server.url, "-q", "Hi", "--max-tokens", "2"))
    assert other.returncode == 0 and other.stdout.strip()  # the server that was named, whatever it has


def hang_up(listener: socket.socket) -> None:
    """Accept connections and close them, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_its_own_server_listens_at_the_port_of_the_settings(model_folder, tmp_path):
    """By flag, variable or file; the answer comes from there."""
    port = free_port()
    fake = ["--distributed-executor-backend", BACKEND, "--max-model-len", "512", "-q", "Hi", "--max-tokens", "400"]
    (tmp_path / "f.yaml").write_text(f"port: {port}")
    for arguments, environment in (
        (["--port", str(port)], {}),
        ([], {"QUIRE_PORT": str(port)}),
        (["--config", str(tmp_path / "f.yaml")], {}),
    ):
        variables = os.environ | environment | {"FAKE_EXECUTOR": "step_delay=0.05"}
        started = command(model_folder, *fake, *arguments)
        with subprocess.Popen(started, env=variables, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.read(1)  # it answers
                models = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()["data"]
                assert models[0]["id"] == Path(model_folder).name
            finally:
                process.terminate()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = str(taken.getsockname()[1])
        threading.Thread(target=hang_up, args=(taken,), daemon=True).start()
        result = run(command(model_folder, *fake, "--port", taken_port))
        assert result.returncode == 1 and f"cannot listen on 127.0.0.1:{taken_port}" in result.stderr, result


def test_flags_that_cannot_have_an_effect(server, tmp_path):
    port = str(server.listener.getsockname()[1])
    for flags, words in (
        (["--url", server.url, "--port", port], "named twice, by --url and by --port"),
        (["--url", server.url, "--host", "x"], "named twice, by --url and by --host"),
        (["--uds", str(tmp_path / "s")], "--uds: this command talks to its server by TCP"),
        (["--address-file", str(tmp_path / "a")], "--address-file: this command"),
        (["--ssl-cert-reqs", "required"], "--ssl-cert-reqs required: this command has no certificate"),
    ):
        result = run(command(*flags, "-q", "Hi"))
        assert result.returncode == 2 and words in result.stderr, result
    short = ["-q", "Hi", "--max-tokens", "2", "--max-num-seqs", "3"]
    for flags in (["--port", port], ["--url", server.url]):
        result = run(command(*flags, *short))
        assert result.returncode == 0 and "no effect on a server that runs already: --max-num-seqs" in result.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_its_own_server_may_have_tls(model_folder, tmp_path):
    cert, key = certificate(tmp_path, "server", 1)
    result = run(own(model_folder, "--ssl-certfile", cert, "--ssl-keyfile", key, "-q", "Hi", "--max-tokens", "4"))
    assert result.returncode == 0 and result.stdout.strip(), result


def test_the_embedded_model_has_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # no folder has the name
    for arguments in (["quire-tiny"], []):
        done = run([sys.executable, "-m", "quire", "serve", *arguments, "--print-config"])
        assert "configs/quire-tiny" in done.stdout, done


def test_errors_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([str(tmp_path / "none.gguf")], "there is no file"),
        ([str(tmp_path / "empty")], "config.json"),
        (["--url", "http://127.0.0.1:1"], "Connection refused"),
    ):
        place = [] if "--url" in arguments else ["--port", str(free_port())]
        result = run([*command(*arguments), *place, "-q", "x"])
        assert result.returncode == 1 and words in result.stderr and result.stderr.count("\n") == 1, result
    assert run(command("--max-modellen", "3")).stderr.endswith("did you mean --max-model-len?\n")


LOST_WAKEUP = """
import select, signal, socket, threading
from quire.cli.run import _end_on_signals
_end_on_signals()
(signals,) = [thread for thread in threading.enumerate() if thread.name == "signals"]
threading.Timer(0.2, signal.pthread_kill, (signals.ident, signal.SIGTERM)).start()
pair = socket.socketpair()
select.select([pair[0]], [], [])
"""


def test_a_signal_just_before_waiting_ends_it():
    """The handler is due, but nothing interrupts the main thread: as if the signal came just before its select()."""
    result = subprocess.run([sys.executable, "-c", LOST_WAKEUP], timeout=20, check=False)
    assert result.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("end", ["ctrl-d", signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_its_server_ends_with_it(model_folder, end, tmp_path):
    terminal, child_side = pty.openpty()
    process = subprocess.Popen(
        own(model_folder),
        stdin=child_side,
        stdout=child_side,
        stderr=child_side,
        start_new_session=True,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )
    os.close(child_side)
    try:
        read_until(terminal, r"/bye or Ctrl-D ends\s+(\x1b\S*)?> ", 60)
        (server,) = psutil.Process(process.pid).children()
        os.write(terminal, b'"""two\nlines"""\n')
        read_until(terminal, r"lines\"\"\"[\s\S]*\n(\x1b\S*)?> ")
        if end == "ctrl-d":
            os.write(terminal, b"\x04")
        else:
            process.send_signal(end)
        process.wait(20)
        poll(lambda: gone(server), 20)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    if end == "ctrl-d":
        history = Path(tmp_path, "quire", "history")
        assert "two" in history.read_text() and history.stat().st_mode & 0o77 == 0
