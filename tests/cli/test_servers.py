"""`quire ps` and `quire stop`: real servers, with an engine that computes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main
from quire.server.startup import running_servers
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.running import poll
from tests.server.test_launch import free_port


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "quire"))
    return tmp_path / "quire"


@contextlib.contextmanager
def serving(folder: str, *flags: str, delay: float = 0.0) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that is ready, and its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "quire", "serve", folder, "--port", str(port), "--max-model-len", "512"]
    command += ["--distributed-executor-backend", BACKEND, *flags]
    variables = os.environ | {"FAKE_EXECUTOR": f"step_delay={delay}"}
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            poll(lambda: is_ready(url), 60)
            yield process, url
        finally:
            process.kill()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    return False


def num_running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:num_requests_running{"))


def listed(capsys, *flags: str) -> list[dict]:
    capsys.readouterr()
    assert main(["ps", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_servers_are_listed_and_stopped(model_folder, capsys):
    with (
        serving(model_folder, "--served-model-name", "one") as (first, url),
        serving(model_folder, "--served-model-name", "two") as (second, other),
    ):
        found = {one["pid"]: one for one in listed(capsys)}
        assert {pid: (one["url"], one["models"]) for pid, one in found.items()} == {
            first.pid: (url, ["one"]),
            second.pid: (other, ["two"]),
        }
        assert all(one["memory"] > 1 << 20 and 0 <= one["since"] < 600 for one in found.values())
        assert [one["pid"] for one in listed(capsys, "--url", f"{other}/v1")] == [second.pid]
        assert main(["ps"]) == 0 and url in capsys.readouterr().out
        assert main(["stop"]) == 1 and "several servers among" in capsys.readouterr().err
        assert (
            main(["stop", "three"]) == 1 and "no server three among the servers of this user" in capsys.readouterr().err
        )
        assert main(["stop", "two"]) == 0 and f"stopped {other} (pid {second.pid})" in capsys.readouterr().out
        assert second.wait(10) == 0
        assert main(["stop", "--url", url.replace("127.0.0.1", "localhost")]) == 0 and first.wait(10) == 0
        assert not listed(capsys) and main(["stop"]) == 1


@pytest.mark.slow
def test_stop_waits_for_requests(model_folder, capsys):
    """Its timeout ends the command, not the drain."""
    with serving(model_folder, delay=0.05) as (process, url):
        answers: list[httpx.Response] = []
        body = {"model": Path(model_folder).name, "prompt": "a", "max_tokens": 100, "ignore_eos": True}
        ask = lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False))  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        poll(lambda: num_running(url) == 1, 20)
        assert main(["stop", str(process.pid), "--timeout", "0.2"]) == 1
        assert "still finishes its requests after 0.2 s" in capsys.readouterr().err
        assert main(["stop", str(process.pid)]) == 0
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 100 and process.wait(10) == 0


@pytest.mark.slow
def test_a_killed_server_is_forgotten(model_folder, cache, capsys):
    with serving(model_folder) as (process, _):
        (file,) = [path for path in (cache / "running").rglob("*") if path.is_file()]
        assert file.parent.stat().st_mode & 0o77 == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert file.is_file() and not listed(capsys) and not file.exists()


def test_the_pid_of_another_process_is_no_server(cache, capsys):
    """A process that has the pid of a server that was killed is neither shown nor stopped."""
    running_servers.folder().mkdir(parents=True)
    file = running_servers.folder() / str(os.getpid())
    mine = {"pid": os.getpid(), "url": "http://127.0.0.1:1", "models": ["m"], "started": "1"}
    file.write_text(json.dumps(mine))
    assert main(["stop", str(os.getpid())]) == 1 and "no server" in capsys.readouterr().err
    assert not listed(capsys)
    (running_servers.folder() / "7").write_text("{")
    assert not listed(capsys)


def test_wrong_arguments(capsys):
    assert main(["ps", "--url", "http://127.0.0.1:1"]) == 1 and "Connection refused" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["stop", "x", "--all"])
    assert "give one of SERVER, --url and --all" in capsys.readouterr().err
    assert main(["stop", "--all"]) == 0  # none runs
