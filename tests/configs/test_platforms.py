"""The server runs where the system lacks what only Linux has, and one module alone asks what there is."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quire.configs import platforms
from quire.configs.config import ParallelConfig
from tests.helpers.server.process import answers, serving

ROOT = Path(__file__).parents[2]
FOLDERS = ("checkpoints", "cli", "configs", "engine", "server", "worker")
WITHOUT = ROOT / "tests" / "helpers" / "platforms"
# names of the standard library that not all systems have
_ONLY_SOME = re.compile(
    r"\bsched_[gs]et\w+|\.prctl\b|\bRLIMIT_\w+|/dev/shm|\baccept4\b|\bMADV_HUGEPAGE|\bSCHED_BATCH|"
    r"\bsocket\.TCP_(?:KEEP|USER)\w+|\bpidfd_open"
)
# both scripts are programs of their own, which import nothing of quire
_MAY_ASK = {"configs/platforms.py", "worker/cpu/build.py", "server/media/video/decoder.py"}


@pytest.mark.slow
def test_one_module_asks_for_what_only_some_systems_have():
    asking = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if _ONLY_SOME.search(path.read_text())
    }
    assert asking == _MAY_ASK


def test_a_process_exists_until_it_is_reaped():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert platforms.process_exists(process.pid) and platforms.process_exists(os.getpid())
    process.communicate()
    assert not platforms.process_exists(process.pid)


def test_what_stands_in_for_missing_names(monkeypatch):
    for name in ("sched_getaffinity", "sched_setscheduler"):
        monkeypatch.delattr(os, name, raising=False)
    for name in ("RLIMIT_AS", "RLIMIT_NOFILE"):
        monkeypatch.delattr(resource, name, raising=False)
    monkeypatch.setattr(platforms, "_SHARED_MEMORY", Path("/nowhere"))
    assert platforms.usable_cpus() == set(range(os.cpu_count()))
    assert not platforms.limit_memory(1 << 40) and platforms.shared_memory(1) is None
    assert platforms.open_files_limits() == (platforms.UNLIMITED, platforms.UNLIMITED)
    platforms.set_open_files_limit(64, 64)
    platforms.schedule_thread_as_batch()


@pytest.mark.parametrize("name", ["socket.TCP_USER_TIMEOUT", "os.pidfd_open"])
def test_several_machines_need_linux(monkeypatch, name):
    monkeypatch.delattr(name, raising=False)
    ParallelConfig(data_parallel_size=2).check_nodes(headless=False)
    ParallelConfig(data_parallel_size=2, data_parallel_rank=1).check_nodes(headless=False)
    for settings in ({"data_parallel_size_local": 1}, {"nnodes": 2}):
        with pytest.raises(ValueError, match="need Linux"):
            ParallelConfig(data_parallel_size=2, **settings).check_nodes(headless=False)


_IMPORT_ALL = """
import importlib, pkgutil, sys
import asyncio, multiprocessing, subprocess, torch, fastapi, uvicorn, zmq, transformers, huggingface_hub, psutil, numpy
import torch._dynamo
sys.platform = "darwin"
import quire
failed = {}
folders = {folder: importlib.import_module(f"quire.{folder}").__path__ for folder in FOLDERS}
modules = [module for folder in FOLDERS for module in pkgutil.walk_packages(folders[folder], f"quire.{folder}.")]
for module in modules:
    if module.name.endswith("__main__") or ".cuda" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("quire", ""):
            failed[module.name] = repr(error)
    except Exception as error:
        failed[module.name] = repr(error)
assert not failed, failed
print(len([name for name in sys.modules if name.startswith("quire.")]))
"""


@pytest.mark.slow
def test_every_module_is_imported_on_macos():
    done = subprocess.run(
        [sys.executable, "-c", f"FOLDERS = {FOLDERS}{_IMPORT_ALL}"],
        capture_output=True,
        text=True,
        timeout=300,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 400


def _environment(**more: str) -> dict[str, str]:
    paths = [str(WITHOUT), *filter(None, os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


@pytest.mark.slow
def test_the_server_runs_without_what_only_linux_has_and_without_a_compiler(tmp_path):
    """Its model is the embedded one; all its processes lack the names."""
    environment = _environment(CXX="no-compiler", QUIRE_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    with serving([sys.executable], environment, tmp_path / "log") as client:
        answers(client)
    assert "plain torch serves" in (tmp_path / "log").read_text()
