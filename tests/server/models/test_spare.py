"""An engine process that waits for its configuration."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from quire.configs.config import Config
from quire.engine.messages import AddRequest, SamplingParams
from quire.server.engines.client import EngineClient
from quire.server.models.spare import SpareEngine
from tests.helpers.engine.fake_executor import BACKEND, expected_tokens

CONFIG = Config.from_flat(distributed_executor_backend=BACKEND, max_num_seqs=4, log_level="warning")


@pytest.fixture
def spare():
    found = SpareEngine()
    yield found
    found.close()


def folder_of(engine) -> Path:
    return Path(engine.address.removeprefix("ipc://")).parent


def test_serves_what_it_is_given_later(spare):
    async def main():
        spare.prepare(CONFIG)
        spare.prepare(CONFIG)  # has no effect
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
    spare.prepare(Config.from_flat() if "tensor_parallel_size" in settings else CONFIG)
    assert spare.take(Config.from_flat(**{"distributed_executor_backend": None} | settings)) is None


def test_one_that_died_is_not_given(spare):
    spare.prepare(CONFIG)
    spare._engine.kill()
    spare._engine.wait()
    assert spare.take(CONFIG) is None
    spare.prepare(CONFIG)
    engine = spare.take(CONFIG)
    assert engine.poll() is None
    engine.kill()


def test_one_that_is_not_needed_leaves_nothing(spare):
    spare.prepare(CONFIG)
    engine = spare._engine
    spare.close()
    engine.wait()
    assert not folder_of(engine).exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_ends_with_a_killed_server():
    """It writes nothing then, whether the kernel ends it or the end of its stdin."""
    program = (
        "import os, signal\nfrom quire.server.models.spare import SpareEngine\n"
        "from quire.configs.config import Config\nspare = SpareEngine()\n"
        f"spare.prepare(Config.from_flat(distributed_executor_backend={BACKEND!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == -9 and result.stderr == ""  # its end closes stderr
