"""Removing from an image what no server reads: sizes, and that what is left still imports and serves."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tools import slim

KEPT = (
    "torch/lib/libtorch_cpu.so",
    "torch/bin/torch_shm_manager",
    "torch/testing/_comparison.py",
    "torch/testing/_internal/common_dtype.py",
    "torch/nn/__pycache__/used.pyc",
    "transformers/models/qwen3/modeling_qwen3.py",
    "numpy/testing/tests.py",
    "pip/__main__.py",
    "other/__pycache__/unused.pyc",
)
REMOVED = (
    "torch/test/a/test_a.py",
    "torch/include/ATen/ATen.h",
    "torch/bin/protoc",
    "torch/bin/test_jit",
    "torch/lib/libjitbackend_test.so",
    "torch/nn/__pycache__/unused.pyc",
    "torch/testing/_internal/opinfo/core.py",
    "networkx/__init__.py",
    "rich/__init__.py",
    "markdown_it_py-4.0.dist-info/METADATA",
    "pip/__pycache__/__main__.pyc",
    "transformers/models/qwen3/modular_qwen3.py",
    "sympy/core/tests/test_a.py",
    "numpy/__init__.pyi",
    "setuptools/__init__.py",
)


def test_removes_what_no_server_reads_and_counts_it(tmp_path):
    for name in (*KEPT, *REMOVED):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    removed = slim.slim(tmp_path, [str(tmp_path / "torch/nn/__pycache__/used.pyc")])
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(KEPT)
    assert sum(removed.values()) == 5 * len(REMOVED) and all(removed.values())


@pytest.mark.slow
def test_a_start_reads_nothing_of_it():
    """Neither with a model of quire's own nor with one that transformers computes."""
    site = Path(sysconfig.get_path("purelib"))
    used = slim.imported()
    sources = {Path(path).parent.parent / (Path(path).name.split(".")[0] + ".py") for path in used}
    assert site / "torch/nn/functional.py" in sources and site / "transformers/modeling_utils.py" in sources
    removed = {kind: list(slim.found(site, patterns)) for kind, patterns in slim.PATTERNS.items()}
    assert removed["torch's headers and programs"], "the patterns do not fit this torch"
    folders = {path for paths in removed.values() for path in paths}
    read = [path for path in sources if folders & {path, *path.parents}]
    assert {path.parent.name for path in read} <= {"_distutils_hack"}  # by its .pth file, which is removed, too
    assert not {Path(path) for path in used} & set(slim.unused_byte_code(site, used))
