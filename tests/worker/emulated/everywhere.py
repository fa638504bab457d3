"""A pytest plugin: all tests of the process with the kernels of $EMULATED_LEVEL (default amx), which this CPU lacks.
Takes ten minutes for the worker's:

    EMULATED_LEVEL=amx .venv/bin/python -m pytest -p tests.worker.emulated.everywhere tests/worker

Levels of AArch64 (`neon` ...) run under qemu-user (qemu.py).
"""

from __future__ import annotations

import os
import sys

from quire.worker.cpu import build
from tests.worker import emulated
from tests.worker.emulated import qemu

_LEVEL = os.environ.get("EMULATED_LEVEL", "amx")
if _LEVEL in qemu.CPUS:
    if (variables := qemu.environment())["LD_PRELOAD"] != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, sys.orig_argv, os.environ | variables)
    for name in variables:  # not of processes that this one starts
        del os.environ[name]
    _LIBRARY = qemu.build_library(_LEVEL)
else:
    _LIBRARY = emulated.build_library(_LEVEL)


# now, for what is decided as test modules are imported
build.cpu_levels, build.build, build.find_library = (
    lambda: [_LEVEL],
    lambda level, folder: _LIBRARY,
    lambda level: _LIBRARY,
)
build.LEVELS, build.levels_of = {_LEVEL: build.LEVELS[_LEVEL]}, lambda kind: [_LEVEL]


def pytest_collection_modifyitems(items: list) -> None:
    """Not those of builds, of which there is none here."""
    items[:] = [item for item in items if item.path.name not in ("test_kernels_build.py", "test_emulated_kernels.py")]
