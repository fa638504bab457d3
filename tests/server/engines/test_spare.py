"""An engine process that waits for its configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.configs.config import Config, ParallelConfig
from quire.engine.messages import AddRequest, SamplingParams
from quire.server import launch
from quire.server.engines.client import EngineClient, EngineUnavailable
from quire.server.engines.spare import SpareEngine
from quire.server.startup import engine_group
from quire.server.startup.engine_group import EngineGroup
from tests.helpers.engine.fake_executor import BACKEND, expected_tokens
from tests.helpers.engine.forked import Fork
from tests.helpers.gpu import has_gpu

CONFIG = Config.from_flat(distributed_executor_backend=BACKEND, max_num_seqs=4, log_level="warning")


@pytest.fixture
def spare():
    found = SpareEngine()
    yield found
    found.close()


def folder_of(engine) -> Path:
    return Path(engine.address.removeprefix("ipc://")).parent


@pytest.mark.skipif(has_gpu(), reason="CUDA may not be forked")
@pytest.mark.parametrize(("name", "forks"), [("KMP_INIT_AT_FORK", True), ("OMP_NUM_THREADS", False)])
def test_tests_fork_engines_unless_they_set_a_variable(spare, monkeypatch, name, forks):
    """Importing scikit-learn sets the first one: all later engines of a run would import torch again."""
    spare.prepare(CONFIG.parallel)
    spare.take(CONFIG).kill()  # the first engine decides on the variables of forks
    monkeypatch.setenv(name, "7")
    spare.prepare(CONFIG.parallel)
    engine = spare.take(CONFIG)
    engine.kill()
    assert isinstance(engine._process, Fork) == forks


def test_serves_what_it_is_given_later(spare):
    async def main():
        spare.prepare(CONFIG.parallel)
        spare.prepare(CONFIG.parallel)  # has no effect
        engine = spare.take(CONFIG)
        assert spare.take(CONFIG) is None
        client = EngineClient()
        try:
            engine.start()
            await client.connect(engine.address)
            await asyncio.wait_for(client.wait_ready(), 60)
            params = SamplingParams(max_tokens=20, seed=3)
            ids = [i async for out in client.generate(AddRequest("a", [1, 2], params)) for i in out.new_token_ids]
            assert ids == expected_tokens([1, 2], params, 4096, 1000)
        finally:
            await client.close()
            assert engine.terminate(5) == 0
        assert not folder_of(engine).exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    "settings",
    [{"data_parallel_size": 2}, {"distributed_executor_backend": "uniproc"}, {"tensor_parallel_size": 2}],
    ids=str,
)
def test_serves_only_settings_like_its_own(spare, settings):
    spare.prepare(ParallelConfig() if "tensor_parallel_size" in settings else CONFIG.parallel)
    assert spare.take(Config.from_flat(**{"distributed_executor_backend": None} | settings)) is None


def test_its_failed_import_is_told_once_it_is_needed(spare, tmp_path, monkeypatch):
    (tmp_path / "broken_executor.py").write_text("raise RuntimeError('the driver is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = Config.from_flat(distributed_executor_backend="broken_executor:Executor", log_level="error")

    async def main():
        spare.prepare(config.parallel)
        engine, client = spare.take(config), EngineClient()
        try:
            engine.start()
            await client.connect(engine.address)
            with pytest.raises(EngineUnavailable, match="RuntimeError: the driver is missing"):
                await asyncio.wait_for(client.wait_ready(), 60)
        finally:
            await client.close()
            assert engine.terminate(5) == 1

    asyncio.run(main())


def test_one_that_died_is_not_given(spare):
    spare.prepare(CONFIG.parallel)
    spare._engine.kill()
    spare._engine.wait()
    assert spare.take(CONFIG) is None
    spare.prepare(CONFIG.parallel)
    engine = spare.take(CONFIG)
    assert engine.poll() is None
    engine.kill()


def test_one_that_is_not_needed_leaves_nothing(spare):
    spare.prepare(CONFIG.parallel)
    engine = spare._engine
    spare.close()
    engine.wait()
    assert not folder_of(engine).exists()


class Unstarted(launch.Launcher):
    """Ends before its engine starts."""

    def _begin(self):
        assert self.spare._engine is not None

    async def run(self):
        return 1


@pytest.mark.parametrize("signalled", [False, True])
def test_a_server_that_ends_at_once_closes_it(spare, signalled, monkeypatch):
    def end(code):
        raise SystemExit(code)

    async def run(self):
        self.engines = self.frontend = SimpleNamespace(kill=lambda: None, refuse=lambda: None)
        for _ in range(2):
            self.on_signal(signal.SIGINT)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    if signalled:
        monkeypatch.setattr(Unstarted, "run", run)
    spare.prepare(CONFIG.parallel)
    engine = spare._engine
    with socket.socket() as listener, pytest.raises(SystemExit):
        asyncio.run(launch._run(Unstarted, CONFIG, listener, 0.0, spare))
    engine.wait()
    assert spare._engine is None and not folder_of(engine).exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_ends_with_a_killed_server():
    """It writes nothing then, whether the kernel ends it or the end of its stdin."""
    program = (
        "import os, signal\nfrom quire.server.engines.spare import SpareEngine\n"
        "from quire.configs.config import ParallelConfig\nspare = SpareEngine()\n"
        f"spare.prepare(ParallelConfig(distributed_executor_backend={BACKEND!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == -9 and result.stderr == ""  # its end closes stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_its_folder_goes_with_a_server_that_is_killed_during_its_imports(tmp_path):
    (tmp_path / "slow_executor.py").write_text("import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(60)")
    (tmp_path / "folders").mkdir()
    program = (
        "import os, pathlib, signal, time\nfrom quire.server.engines.spare import SpareEngine\n"
        "from quire.configs.config import ParallelConfig\nspare = SpareEngine()\n"
        "spare.prepare(ParallelConfig(distributed_executor_backend='slow_executor:Executor'))\n"
        "while not pathlib.Path('imports').exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "folders")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert result.returncode == -9 and result.stderr == b""
    assert not list((tmp_path / "folders").iterdir())


def test_a_disk_without_room_is_reported_by_the_start_of_the_engine(spare, monkeypatch):
    def mkdtemp(**where):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    spare.prepare(CONFIG.parallel)
    assert spare.take(CONFIG) is None
    group = EngineGroup(CONFIG, spare.take)
    monkeypatch.setattr(engine_group, "local_config", lambda config, *folders, **options: config)
    with pytest.raises(ValueError, match="engine 0 cannot be started: No space left on device"):
        group.start("folder")
