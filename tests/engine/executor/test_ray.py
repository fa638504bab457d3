"""Ranks as Ray actors, on a local cluster of two CPUs."""

from __future__ import annotations

import os
import select
from pathlib import Path

import psutil
import pytest

from tests.engine.executor.test_parallel import PROMPTS, SAMPLING, SETTINGS, alone
from tests.helpers.in_process import InProcessEngine
from tests.helpers.server.running import poll
from tests.server.test_launch import gone, server_process

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch):
    """Two CPUs, whatever the machine has. The actors import our modules from here."""
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()


def test_two_ranks_give_what_one_gives(cluster, checkpoint):
    folder = checkpoint("qwen3")
    engine = InProcessEngine(folder, **SETTINGS, distributed_executor_backend="ray", tensor_parallel_size=2)
    try:
        for result, expected in zip(engine.generate(PROMPTS, SAMPLING), alone(folder), strict=True):
            assert result.error is None and result.token_ids == expected.token_ids
        ready = lambda: select.select(engine.executor.sentinels(), [], [], 0)[0]  # noqa: E731
        assert not ready()
        ray.kill(engine.executor._ranks[1])
        with pytest.raises(RuntimeError, match="worker 1 died"):
            engine.generate(PROMPTS, SAMPLING)
        assert select.select(engine.executor.sentinels(), [], [], 10)[0]
    finally:
        engine.close()


def test_a_cluster_without_room(cluster, checkpoint, monkeypatch):
    monkeypatch.setattr("quire.engine.executor.ray_cluster.PLACEMENT_TIMEOUT", 1.0)
    with pytest.raises(ValueError, match="no room for 3 ranks"):
        InProcessEngine(checkpoint("qwen3"), **SETTINGS, distributed_executor_backend="ray", tensor_parallel_size=3)


def test_a_killed_server_leaves_nothing_of_a_cluster_it_started(checkpoint, tmp_path, monkeypatch):
    """Without an existing cluster, Ray starts one below the engine, in its own process groups and sessions."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with server_process(
        checkpoint("qwen3"),
        tmp_path,
        temporary=Path("/tmp"),
        **SETTINGS | {"num_threads": 1, "distributed_executor_backend": "ray", "tensor_parallel_size": 2},
    ) as server:
        poll(lambda: server.status("/ready") == 200 or server.process.poll() is not None, 120)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in children), server.log
        server.process.kill()
        poll(lambda: all(gone(child) for child in children), 2)
