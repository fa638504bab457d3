"""The server runs where the system lacks what only Linux has, and one module alone asks what there is."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.configs import platforms
from tests.helpers.server.running import poll

ROOT = Path(__file__).parents[2]
FOLDERS = ("checkpoints", "cli", "configs", "engine", "server", "worker")
WITHOUT = ROOT / "tests" / "helpers" / "platforms"
# names of the standard library that not all systems have
_ONLY_SOME = re.compile(r"\bsched_[gs]et\w+|\.prctl\b|\bRLIMIT_\w+|/dev/shm|\baccept4\b|\bMADV_HUGEPAGE|\bSCHED_BATCH")
# build.py is also a script of its own, which imports nothing of quire
_MAY_ASK = {"configs/platforms.py", "worker/cpu/build.py"}


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
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with open(log, "w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "quire-tiny", "--port", str(port)],
            stdout=output,
            stderr=output,
            env=_environment(CXX="no-compiler", QUIRE_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"),
        )
    try:
        poll(lambda: "ready in" in log.read_text() or server.poll() is not None, 200)
        assert server.poll() is None, log.read_text()
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            for more in ({}, {"response_format": format}):
                answer = client.post("/v1/chat/completions", json=body | {"model": model} | more)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] > 0
        assert "plain torch serves" in log.read_text()
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
