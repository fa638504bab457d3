"""A pytest plugin: all tests of the process with the kernels of $EMULATED_LEVEL (default amx), which this CPU lacks.
Takes ten minutes for the worker's:

    EMULATED_LEVEL=amx .venv/bin/python -m pytest -p tests.worker.emulated.everywhere tests/worker
"""

from __future__ import annotations

import os

from quire.worker.cpu import build
from tests.worker import emulated

_LEVEL = os.environ.get("EMULATED_LEVEL", "amx")
_LIBRARY = emulated.build_library(_LEVEL)


def pytest_configure() -> None:
    build.cpu_levels, build.build, build.find_library = (
        lambda: [_LEVEL],
        lambda level, folder: _LIBRARY,
        lambda level: _LIBRARY,
    )
    build.LEVELS = {_LEVEL: build.LEVELS[_LEVEL]}


def pytest_collection_modifyitems(items: list) -> None:
    """Not those of builds, of which there is none here."""
    items[:] = [item for item in items if item.path.name not in ("test_kernels_build.py", "test_emulated_kernels.py")]
