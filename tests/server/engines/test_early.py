"""The engine that `quire serve` starts before it reads the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.configs.config import Config, ParallelConfig
from quire.server.engines import spawn
from quire.server.engines.spare import SpareEngine
from quire.server.engines.spawn import EarlyEngine, early_engine
from tests.helpers.engine.fake_executor import BACKEND

ONE_RANK = Config.from_flat(distributed_executor_backend="uniproc")


@pytest.fixture
def early():
    found = EarlyEngine()
    yield found
    found.close()


def test_it_serves_a_configuration_like_its_own(early):
    process = early._process
    spare = SpareEngine(early=early)
    early.close()  # has no effect
    spare.prepare(ONE_RANK.parallel)
    engine = spare.take(ONE_RANK)
    assert engine.pid == process.pid and engine.poll() is None
    assert engine.address == f"ipc://{early.folder}/engine" and engine.config is ONE_RANK
    engine.kill()
    assert engine.wait() == -signal.SIGKILL and not Path(early.folder).exists()


def test_another_executor_replaces_it(early):
    process = early._process
    spare = SpareEngine(early=early)
    spare.prepare(ParallelConfig(distributed_executor_backend=BACKEND))
    assert process.wait() == -signal.SIGKILL and not Path(early.folder).exists()
    assert spare._engine.pid != process.pid
    spare.close()


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["model", "-h"], ["-tp", "2"], ["--tensor_parallel_size=2"], ["--models-dir", "."], ["--headless"]],
)
def test_commands_that_need_another_engine_start_none(arguments, monkeypatch):
    monkeypatch.setattr(spawn, "spawn", None)
    assert early_engine(arguments) is None


def test_a_system_without_room_for_it_starts_none(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(spawn, "spawn", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert early_engine(["model"]) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prot", "1"], "unknown flag --prot"),
        (["/nowhere", "--port", "0"], "/nowhere"),
        (["--max-model-len", "-3"], "--max-model-len"),
        (["one", "two", "--api-server-count", "2", "--port", "0"], "--api-server-count"),
    ],
)
def test_an_error_in_the_command_line_leaves_no_process(arguments, error, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,  # its end needs the end of every process that writes there
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode in (1, 2) and error in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when it has imported its packages")
def test_it_ends_with_a_killed_server():
    program = (
        "import os, signal\nfrom quire.server.engines.spawn import EarlyEngine\nearly = EarlyEngine()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL and result.stderr == ""
