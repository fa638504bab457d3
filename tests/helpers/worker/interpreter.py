"""Checks whether Triton's interpreter, which tests/conftest.py selects without a GPU, can run the project's kernels."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _count(x):
    for i in range(0, tl.load(x)):
        tl.store(x + 1, i)


def loops_work() -> bool:
    if torch.cuda.is_available():
        return True
    x = torch.tensor([3, 0])
    try:
        _count[(1,)](x)
    except triton.runtime.errors.InterpreterError:
        return False
    return x.tolist() == [3, 2]


needs_loops = pytest.mark.skipif(
    not loops_work(),
    reason="this Triton interpreter cannot loop over loaded values with this numpy (3.6 with numpy 2.4 or later)",
)
