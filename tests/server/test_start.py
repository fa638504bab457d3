"""Tests messages and errors of startup in the log of a server with the fake executor."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import termios

import pytest

from quire import __main__
from tests.helpers.server.light_model import write_light_model
from tests.helpers.server.running import running_server


def test_a_model_without_a_chat_template_is_pointed_out(tmp_path, caplog):
    folder = write_light_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with caplog.at_level(logging.WARNING), running_server(folder) as server:
        server.wait_ready()
    assert "no chat template" in (said := caplog.text) and "--chat-template" in said


def test_a_chat_template_needs_no_warning(model_folder, caplog):
    with caplog.at_level(logging.WARNING), running_server(model_folder) as server:
        server.wait_ready()
    assert "chat template" not in caplog.text


@pytest.mark.slow
def test_no_tokenizer_is_no_start(tmp_path):
    """In a process of its own, which a server that cannot start ends at once."""
    folder = write_light_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    command = [sys.executable, "-m", "quire", "serve", folder, "--device", "cpu", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"tokenizer: there are no tokenizer files in {folder}" in ended.stderr


INTERRUPTED = """
import os, signal, sys
from quire.__main__ import main

def interrupt(self, *_):
    os.kill(os.getpid(), signal.SIGINT)
    start(self)

if sys.argv.pop() == "imports":
    import quire.cli.main
    quire.cli.main.main = interrupt
    start = lambda argv: int("not reached")
else:
    from quire.server.startup.engine_group import EngineGroup
    start, EngineGroup.start_if_local = EngineGroup.start_if_local, interrupt
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", "start of the engine"])
def test_ctrl_c_before_the_server_listens_to_signals(model_folder, moment, tmp_path, monkeypatch):
    """No traceback, no error of `make serve`, and no engine with its folder is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", INTERRUPTED, "serve", model_folder, "--device", "cpu", "--port", "0", moment]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert ("shutdown complete" in ended.stderr) == (moment != "imports")
    assert not list(tmp_path.iterdir())


LOADING = """
import asyncio, os, signal, sys
from quire.__main__ import main
from quire.server.startup.engine_group import EngineGroup

async def run(self, user, on_ready, on_stats, progress):
    progress("loading weights", 0.5)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

EngineGroup.run = run
sys.exit(main())
"""


@pytest.mark.slow
def test_ctrl_c_while_a_bar_shows_the_loading(model_folder):
    """The line of the log does not follow the bar on its line."""
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 80))
    command = [sys.executable, "-c", LOADING, "serve", model_folder, "--device", "cpu", "--port", "0"]
    ended = subprocess.run(command, stderr=stderr, timeout=60, check=False)
    os.close(stderr)
    lines = os.read(terminal, 1 << 16).decode().replace("\r", "\n").splitlines()
    os.close(terminal)
    assert ended.returncode == 0 and any("loading weights:  50%" in line for line in lines), lines
    (said,) = (line for line in lines if "stopping before the model is loaded" in line)
    assert said.startswith("20")  # the year


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_closed_standard_streams_are_not_given_to_other_files(closed):
    """A socket with the number of stderr would get the log."""
    program = (
        "import os, sys\nfrom quire import __main__\nfrom quire.cli import main\n"
        "def run(argv, early):\n    print('out')\n    print('err', file=sys.stderr)\n"
        "    return os.open(os.devnull, os.O_RDONLY)\n"
        "main.main = run\n"
        "code = __main__.main()\nsys.stdout.flush()\n"
        "raise SystemExit(0 if code > 2 and all(map(os.get_inheritable, range(3))) else 9)"
    )
    command = f'exec "$0" -c "$1" list {closed}'
    assert subprocess.run(["bash", "-c", command, sys.executable, program], timeout=60, check=False).returncode == 0


def test_a_user_without_a_home_has_the_root_folder(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr("quire.cli.main.main", lambda argv, early: print(os.environ["HOME"]) or 0)
    monkeypatch.setenv("HOME", "x")
    assert __main__.main() == 0 and os.environ["HOME"] == "/"
