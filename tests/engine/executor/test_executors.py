"""The executors that run real workers, with a fake worker."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from quire.configs.config import Config
from quire.engine.executor.base import steps_in_flight
from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, SamplingParams
from quire.engine.scheduler import Scheduler
from tests.helpers.engine import fake_worker
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB

SAMPLING = SamplingParams(max_tokens=12)
PROMPTS = {"a": [1, 2, 3], "b": [4], "c": [5] * 40}


def generate(executor, config: Config, ready) -> dict[str, list[int]]:
    """Run the engine's loop over an executor."""
    scheduler = Scheduler(config.scheduler, ready, KVCacheManager(ready.num_blocks, ready.block_size))
    for name, prompt in PROMPTS.items():
        scheduler.add(AddRequest(name, prompt, SAMPLING))
    tokens, in_flight = {name: [] for name in PROMPTS}, []
    while scheduler.requests or in_flight:
        while len(in_flight) < steps_in_flight(config, ready) and (step := scheduler.schedule()):
            in_flight.append((step, executor.execute(step.input)))
        step, pending = in_flight.pop(0)
        for output in scheduler.update(step, pending.result()).get(b"", []):
            tokens[output.request_id] += output.new_token_ids
    return tokens


EXPECTED = {name: expected_tokens(prompt, SAMPLING, 4096, VOCAB) for name, prompt in PROMPTS.items()}


@pytest.fixture
def uniproc(monkeypatch):
    """The in-process executor over the fake worker; the real worker module is not imported."""
    module = types.ModuleType("quire.worker.worker")
    module.Worker = fake_worker.LateResults
    monkeypatch.setitem(sys.modules, "quire.worker.worker", module)
    monkeypatch.delitem(sys.modules, "quire.engine.executor.uniproc", raising=False)
    # not the package's attribute, which may be an earlier import
    yield importlib.import_module("quire.engine.executor.uniproc").UniprocExecutor
    sys.modules.pop("quire.engine.executor.uniproc", None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_uniproc(uniproc, depth):
    config = Config.from_flat(steps_in_flight=depth)
    executor = uniproc(config)
    ready = executor.initialize(lambda phase, fraction: None)
    assert generate(executor, config, ready) == EXPECTED
    assert executor.call("whoami", "rank") == "rank 0 of 1"
    executor.shutdown()
    assert executor._worker.stopped


def test_uniproc_launches_the_next_step_while_the_last_is_awaited(uniproc):
    executor = uniproc(Config.from_flat(steps_in_flight=2))
    ready = executor.initialize(lambda phase, fraction: None)
    scheduler = Scheduler(executor._config.scheduler, ready, KVCacheManager(ready.num_blocks, ready.block_size))
    scheduler.add(AddRequest("a", [1], SAMPLING))
    first, _ = (executor.execute(scheduler.schedule().input) for _ in range(2))
    first.result()
    assert executor._worker.launched == 2
    executor.shutdown()


def multiproc(model: str = "", worker: str = "FakeWorker", **settings) -> MultiprocExecutor:
    executor = MultiprocExecutor(Config.from_flat(model=model, **settings))
    executor.worker_class = f"tests.helpers.engine.fake_worker:{worker}"
    return executor


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its engine"
        time.sleep(0.02)


def test_two_ranks_run_every_step():
    executor, progress = multiproc(worker="LateResults", tensor_parallel_size=2, steps_in_flight=2), []
    ready = executor.initialize(lambda phase, fraction: progress.append((phase, fraction)))
    pids = [process.pid for process in executor._processes]
    try:
        assert len(pids) == 2 and progress[-1] == ("loading weights", 1.0)
        if sys.platform == "linux":
            assert [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids] == [
                "quire-worker-0",
                "quire-worker-1",
            ]
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert generate(executor, executor._config, ready) == EXPECTED
        assert executor.call("whoami", "rank") == "rank 0 of 2"
        assert [executor.call("load_lora", key, "files") for key in "012"] == [
            "rank 0 has no files",
            "rank 1 has no files",
            "",
        ]
        assert len(executor.sentinels()) == 2
    finally:
        executor.shutdown()
    assert_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("own_folder", [True, False])
def test_ranks_meet_where_nobody_else_can_go(monkeypatch, tmp_path, own_folder):
    """The rendezvous is a file, not a port of this machine, which any user could join."""
    if own_folder:
        monkeypatch.setenv("QUIRE_STACKS_FOLDER", str(tmp_path))
    executor = multiproc(tensor_parallel_size=2)
    try:
        executor.initialize(lambda phase, fraction: None)
        method, _, path = executor.call("rendezvous").partition("://")
        folder = Path(path).parent
        assert method == "file" and folder.stat().st_mode & 0o077 == 0 and (folder == tmp_path) == own_folder
    finally:
        executor.shutdown()
    assert not Path(path).exists() and folder.exists() == own_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, words",
    [
        ("crash-0", r"worker 0 died \(exit code 9\)"),
        ("crash-1", r"worker 1 died \(exit code 9\)"),
        ("raise-1", "no kernel for that"),
    ],
)
def test_a_failing_rank_fails_the_step(model, words):
    executor = multiproc(model, tensor_parallel_size=2)
    ready = executor.initialize(lambda phase, fraction: None)
    pids = [process.pid for process in executor._processes]
    with pytest.raises(RuntimeError, match=words):
        generate(executor, executor._config, ready)
    executor.shutdown()
    assert_gone(pids)


def test_death_is_seen_while_another_rank_hangs_or_the_engine_rests():
    executor = multiproc("hang-1", tensor_parallel_size=2)
    ready = executor.initialize(lambda phase, fraction: None)
    pids = [process.pid for process in executor._processes]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"worker 1 died \(killed by signal 9\)"):
        generate(executor, executor._config, ready)
    executor.kill()
    assert_gone(pids)
    executor.shutdown()


def test_what_the_user_can_correct_stays_a_value_error():
    executor = multiproc("bad-model")
    with pytest.raises(ValueError, match=r"^bad-model has no weights$"):
        executor.initialize(lambda phase, fraction: None)
    executor.shutdown()
