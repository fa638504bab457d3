"""Each C++ struct that native.py mirrors has the size and the offsets of its twin, by the compiler's word."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from quire.worker.cpu import build, native

MIRRORED = sorted(
    (one for one in vars(native).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)),
    key=lambda one: one.__name__,
)
pytestmark = pytest.mark.skipif(
    build.compiler() is None or build.cpu_level() is None, reason="needs a C++ compiler, and a CPU that has kernels"
)


def check(*twins: type[ctypes.Structure]) -> str:
    """C++ that compiles only if the structs named in the docstrings of `twins` have their layouts."""
    includes, asserts = {}, []
    for twin in twins:
        name, file = re.search(r"Mirrors `(\w+)` in (\w+\.(?:h|cpp))", " ".join(twin.__doc__.split())).groups()
        includes[f'#include "{file}"'] = None
        asserts.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(twin)});")
        for field, *_ in twin._fields_:
            asserts.append(f"static_assert(offsetof({name}, {field}) == {getattr(twin, field).offset});")
    return "\n".join([*includes, "#include <cstddef>", *asserts])


def compiles(source: str) -> str:
    """Return the compiler's errors for `source`, empty if there are none."""
    options = [*build.FLAGS, *(f"-m{name}" for name in build.LEVELS[build.cpu_level()])]
    command = [build.compiler(), "-x", "c++", "-fsyntax-only", "-Wno-invalid-offsetof", *options]
    done = subprocess.run(
        [*command, f"-I{build.SOURCES}", "-"], input=source, capture_output=True, text=True, timeout=200
    )
    return done.stderr if done.returncode else ""


@pytest.mark.slow
def test_layouts():
    assert len(MIRRORED) >= 15
    assert not compiles(check(*MIRRORED))


@pytest.mark.slow
def test_a_wrong_layout_is_found():
    class Wrong(ctypes.Structure):
        """Mirrors `CacheGroup` in segment.cpp."""

        _fields_ = [("slots", ctypes.c_void_p), ("ld_table", ctypes.c_long), ("block_table", ctypes.c_void_p)]

    assert "static assertion failed" in compiles(check(Wrong))
