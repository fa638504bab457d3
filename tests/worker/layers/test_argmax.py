"""The largest logit by bounds in 8 bits is that of all logits."""

from __future__ import annotations

import pytest
import torch

from quire.worker.layers import argmax
from quire.worker.layers.argmax import ArgmaxScreen
from quire.worker.layers.embedding import ParallelLMHead
from quire.worker.layers.linear import product

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="torch has reference loops only"
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(argmax, "_MIN_WEIGHTS", 1)
    monkeypatch.setattr(argmax, "_FIRST_CALLS", 0)
    monkeypatch.setattr(argmax.host, "memory", lambda: (10 << 30, 10 << 30))
    monkeypatch.setattr(argmax, "_PIECE", 64 * 100)  # several pieces, and a remainder


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_it_is_that_of_all_logits(monkeypatch, spread, rows):
    """Rows of very different sizes, rows of zeros, and several rows that are the same."""
    monkeypatch.setattr(argmax, "multiplies", lambda dtype: False)
    weight = random(1000, 64) * (spread * random(1000, 1, seed=1)).exp()
    weight[::7] = 0
    weight[500:510] = weight[400]
    screen, found = ArgmaxScreen(weight, product), 0
    for seed in range(40):
        x = random(rows, 64, seed=seed)
        if seed == 0:
            x[-1] = weight[400]
        ids = screen.largest(x)
        if ids is not None:
            found += 1
            logits = x.double() @ weight.double().T
            assert len(ids) == rows
            # within the rounding of logits to bfloat16
            torch.testing.assert_close(logits.gather(1, ids[:, None])[:, 0], logits.amax(1), rtol=2**-6, atol=1e-6)
            if rows == 1:
                assert ids.tolist() == product(x, weight).argmax(-1).tolist()
    assert found > 30


def test_it_pauses_where_many_outputs_may_be_the_largest():
    screen = ArgmaxScreen(random(1, 64).expand(1000, 64).contiguous(), product)
    assert screen.largest(random(1, 64)) is None and screen._wait == argmax._PAUSE


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_left_to_the_sampler(monkeypatch, bad, rows):
    monkeypatch.setattr(argmax, "multiplies", lambda dtype: False)
    x = random(rows, 64)
    x[-1, 3] = bad
    assert ArgmaxScreen(random(1000, 64), product).largest(x) is None


def test_what_it_is_not_for(monkeypatch):
    monkeypatch.setattr(argmax, "multiplies", lambda dtype: True)  # then products of several rows take less time
    assert ArgmaxScreen(random(1000, 64).float(), product).largest(random(1, 64).float()) is None
    assert ArgmaxScreen(random(1000, 64), product).largest(random(2, 64)) is None


def test_the_copy_needs_memory_to_spare(monkeypatch):
    monkeypatch.setattr(argmax.host, "memory", lambda: (10 << 30, 5 << 30))
    assert ArgmaxScreen(random(1000, 64), product).largest(random(1, 64)) is None


def test_a_head_without_kernels_uses_it_and_drops_it_with_its_weight():
    head = ParallelLMHead(1000, 64, "lm_head.weight")
    head.weight = torch.nn.Parameter(random(1000, 64), requires_grad=False)
    x = random(1, 64, seed=2)
    assert head.largest(x).tolist() == head(x).argmax(-1).tolist()
    assert head.screen is not None
    head.finalize()
    assert head.screen is None
