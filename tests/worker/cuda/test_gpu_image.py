"""On a GPU machine without a package index: the GPU tests can be collected and the server imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PLUGINS = "-p", "tests.helpers.worker.gpu_image", "-p", "pytest_timeout"


def run(*arguments: str) -> str:
    """The output of Python with only the packages of that machine."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command, options = [sys.executable, *arguments], dict(capture_output=True, text=True, check=False, timeout=240)
    ended = subprocess.run(command, cwd=ROOT, env=environment, **options)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_gpu_tests_are_collected():
    """gguf and compressed-tensors are not there: files that need them are skipped, and no file fails."""
    collected = run("-m", "pytest", *PLUGINS, "--collect-only", "-q", "-m", "gpu", "tests/worker")
    skipped = [line for line in collected.splitlines() if line.startswith("SKIPPED")]
    assert "test_gpu.py::" in collected and "test_attention.py::" in collected and "ERROR" not in collected
    assert skipped and all("compressed_tensors" in line or "gguf" in line or "bitsandbytes" in line for line in skipped)


@pytest.mark.parametrize(
    "module",
    [
        "quire.cli.main",
        "quire.server.app",
        "quire.server.routes",
        "quire.server.frontends.frontend",
        "quire.server.offline.llm",
        "quire.engine.core",
        "quire.worker.worker",
        "benchmarks.gpu",
    ],
)
def test_the_server_is_imported(module):
    run("-c", f"import tests.helpers.worker.gpu_image, {module}")


def test_a_module_that_is_not_there_cannot_be_imported():
    script = "import tests.helpers.worker.gpu_image\ntry:\n import ruff\nexcept ModuleNotFoundError: print('hidden')"
    assert run("-c", script) == "hidden\n"
