"""Installs each level of the native CPU kernels in turn, for tests that compare them with plain torch."""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire.worker.cpu import build, native

LEVELS = build.levels_of(build.machine())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of one rounding, with a margin for a different order of summation.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def usable_levels() -> list[str]:
    best = build.cpu_level()
    return LEVELS[LEVELS.index(best) :] if best and build.compiler() else []


@contextmanager
def installed(level: str, library: Path):
    """Make `library` the process's kernels within the context."""
    kernels, loaded = native.KERNELS, native.Kernels()
    loaded.level = level
    assert loaded._open(str(library)), loaded.status
    saved = kernels.lib, kernels.level
    kernels.lib, kernels.level = loaded.lib, level
    yield
    kernels.lib, kernels.level = saved


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(level, marks=[] if level == build.cpu_level() else pytest.mark.slow) for level in usable_levels()
    ],
)
def kernels(request):
    """Install the kernels of each level in turn, and return the level.

    They are compiled on first use (seconds) and cached.
    """
    with installed(request.param, build.build(request.param, build.cache_folder())):
        yield request.param


@pytest.fixture(params=[pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(4)])
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def assert_near(got: torch.Tensor, want: torch.Tensor, relative: float, scale: float | None = None) -> None:
    """Assert that each element's error is within 2 * `relative` times the sum of its own size and a typical element's.
    The typical size allows for cancellation, which makes small elements less exact.
    """
    got, want = got.float(), want.float()
    typical = want.abs().mean().item() if scale is None else scale
    excess = (got - want).abs() - 2 * relative * (want.abs() + typical)
    assert not torch.isnan(got).any() and excess.max() <= 0, (
        f"off by {(got - want).abs().max().item():.3g}, typical value {typical:.3g}"
    )


def nan_cache(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a cache full of NaN, which exposes any read of an unwritten slot, even one that is multiplied by 0."""
    if layout == "heads first":
        return torch.full((num_blocks, heads, block_size, dim), float("nan"), dtype=dtype).transpose(1, 2)
    return torch.full((num_blocks, block_size, heads, dim), float("nan"), dtype=dtype)
