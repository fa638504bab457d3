"""Defines fixtures of the worker tests."""

from __future__ import annotations

import pytest

from quire.worker.cpu import build
from quire.worker.cpu.native import KERNELS
from tests.helpers.worker.native_kernels import kernels, rng  # noqa: F401  fixtures


@pytest.fixture
def exact_activations(monkeypatch):
    """Multiply quantized weights by activations of 16 bits, which are finer than bfloat16."""
    monkeypatch.setattr(KERNELS, "activation_bits", 16)


@pytest.fixture(scope="module")
def native_kernels():
    """Load the native CPU kernels while a module's tests run (building them first, in seconds, if the cache lacks
    them).
    """
    if build.cpu_level() is None or (build.compiler() is None and build.find_library(build.cpu_level()) is None):
        pytest.skip("no native kernels here")
    before = KERNELS.lib
    assert KERNELS.load(background=False), KERNELS.status
    yield KERNELS
    KERNELS.lib = before
