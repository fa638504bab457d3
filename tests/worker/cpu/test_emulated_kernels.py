"""The tests of the native kernels once more with AMX, emulated (tests/worker/emulated) where the CPU lacks it.

Of AVX-512 that takes nearly everything with it.
"""

from __future__ import annotations

import inspect
import random

import pytest
import torch

from quire.worker.cpu import build
from tests.helpers.worker.native_kernels import installed
from tests.worker import emulated
from tests.worker.cpu import test_kernels, test_native_attention, test_native_ops
from tests.worker.cuda.kernels import test_scaled_kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # compiling takes minutes
globals().update(
    {
        f"{name}_in_8_bits" if module is test_scaled_kernels else name: test
        for module in (test_kernels, test_native_attention, test_native_ops, test_scaled_kernels)
        for name, test in vars(module).items()
        if name.startswith("test_") and "kernels" in inspect.signature(test).parameters
    }
)


@pytest.fixture(scope="module")
def kernels():
    if build.cpu_level() in (None, "amx") or build.compiler() is None:
        pytest.skip("the CPU has AMX itself, or cannot emulate it")
    with installed("amx", emulated.build_library("amx")):
        yield "amx"


@pytest.fixture
def rng():
    """One seed: the cases are those of every level, and each takes ten times as long here."""
    torch.manual_seed(0)
    return random.Random(0)
