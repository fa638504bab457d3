"""What servers started side by side plan for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.configs.config import Config
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda.device import CudaPlatform
from quire.worker.host import resources as host
from quire.worker.platforms.promises import Promises

GIB = 1 << 30
OTHER = """
import sys
from pathlib import Path
from quire.worker.platforms.promises import Promises
promises = Promises(Path(sys.argv[1]))
promises.make(int(sys.argv[2]))
filled = bytearray(b"x" * int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """`other(size, filled)` starts a process that plans for `size` bytes and occupies `filled`."""
    processes = []

    def start(size: int, filled: int = 0) -> subprocess.Popen:
        command = [sys.executable, "-c", OTHER, str(tmp_path / "plans"), str(size), str(filled)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_others_plan_for_and_do_not_occupy_yet(other, tmp_path):
    ours = Promises(tmp_path / "plans")
    assert ours.unfilled() == 0
    first = other(GIB)
    assert 0.8 * GIB < ours.unfilled() < GIB  # its interpreter is resident
    other(GIB, filled=GIB // 2)
    assert 1.3 * GIB < ours.unfilled() < 1.5 * GIB
    ours.make(10 * GIB)
    assert ours.unfilled() < 1.5 * GIB  # without our own
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert ours.unfilled() < 0.5 * GIB
    assert not Path(tmp_path, "plans", str(first.pid)).exists()
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700


def test_a_server_plans_with_what_others_leave(other, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "memory", lambda: (16 * GIB, 8 * GIB))
    platform = CpuPlatform()
    platform._promises = Promises(tmp_path / "plans")
    assert platform.memory() == (16 * GIB, 8 * GIB)
    other(6 * GIB)
    total, available = platform.memory()
    assert total == 16 * GIB and 2 * GIB <= available < 2.3 * GIB
    gibs = lambda config: (RamTier.plan(config, platform) or 0) / GIB  # noqa: E731
    assert gibs(Config.from_flat(kv_offload_gib=1.5)) == 1.5 and gibs(Config()) == 0
    with pytest.raises(ValueError, match=r"-gib 3: 3\.00 GiB are more than the 2\.\d+ GiB .*at most 2\."):
        gibs(Config.from_flat(kv_offload_gib=3))
    with pytest.raises(ValueError, match=r"--kv-offload-gib 1\.5 for each of 2 engines.*at most 1\."):
        gibs(Config.from_flat(kv_offload_gib=1.5, data_parallel_size=2))
    gpu = CudaPlatform(0)
    gpu._promises = platform._promises
    assert 0.5 <= RamTier.plan(Config(), gpu) / GIB < 0.6
    other(6 * GIB)
    assert platform.memory()[1] == 0 and RamTier.plan(Config(), gpu) is None


def test_a_folder_that_cannot_be_written_is_no_catastrophe(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    platform = CpuPlatform()
    platform._promises = Promises(tmp_path / "file" / "below")
    platform.promise_ram(GIB)
    assert "will not know our memory plan" in caplog.text


def test_memory_is_wanted_back_when_the_machine_is_short_or_after_a_long_time(monkeypatch):
    platform = CpuPlatform()
    monkeypatch.setattr(host, "memory", lambda: (16 * GIB, 8 * GIB))
    assert not platform.wants_memory_back(60.0) and platform.wants_memory_back(3600.0)
    monkeypatch.setattr(host, "memory", lambda: (16 * GIB, GIB))
    assert platform.wants_memory_back(5.0)
