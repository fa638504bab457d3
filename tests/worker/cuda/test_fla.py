"""Delta rules by flash-linear-attention: with a package that computes the formula, with wrong, slow and broken ones,
and with the real one if it is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import logging
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from quire.worker.cuda import fla, install
from quire.worker.layers.rowwise import l2_norm
from quire.worker.layers.state import by_stages
from quire.worker.layers.states.delta_rule import delta_many, gated_delta_rule
from quire.worker.platforms.base import TORCH
from tests.worker.layers.test_states import state_step

HEADS, KEYS, VALUES = 4, 16, 24


def formula(calls, per_channel):
    """A function of the package, with the formula in its place; notes the lengths of the prompts of each call."""

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu):
        assert scale == 1.0 and output_final_state and q.dtype == k.dtype == v.dtype == beta.dtype == torch.float16
        assert g.dtype == initial_state.dtype == torch.float32 and cu_seqlens.dtype == torch.int64
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist() and cu_seqlens[-1] == q.shape[1]
        assert g.shape == (1, *v.shape[1:3], *([KEYS] if per_channel else []))
        calls.append(cu_seqlens.diff().tolist())
        g = g[0] if per_channel else g[0][..., None]
        q, k, v, beta = (x[0].float() for x in (q, k, v, beta))
        if q.shape[1] < v.shape[1]:
            assert not per_channel, "the package wants as many key heads as value heads here"
            q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        results, states = [], []
        for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            result, state = delta_many(initial_state[i], *(x[start:stop] for x in (q, k, v, g, beta)))
            results.append(result)
            states.append(state)
        return torch.cat(results)[None].half(), torch.stack(states)

    return rule


@pytest.fixture
def package(monkeypatch):
    """The package, as a namespace whose functions tests replace, and the lengths of the prompts of each call."""
    calls = []
    names = SimpleNamespace(gated=formula(calls, False), kda=formula(calls, True), calls=calls)
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")}
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = lambda *a, **k: names.gated(*a, **k)
    modules["fla.ops.kda"].chunk_kda = lambda *a, **k: names.kda(*a, **k)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"fla-core": "9.9"}[name])
    return names


def clock(package=1, own=3):
    """A clock by which each measured run takes a number of ticks."""
    now, runs = 0, itertools.cycle([package] * 3 + [own] * 3)
    while True:
        yield now
        now += next(runs)
        yield now


def delta_rule(**ticks):
    return fla.DeltaRule(gated_delta_rule, torch.float16, (4, 8), clock(**ticks).__next__)


def example(num_tokens, per_channel=False):
    q, k = (l2_norm(torch.randn(num_tokens, HEADS // 2, KEYS)) for _ in range(2))
    g = -F.softplus(torch.randn(num_tokens, HEADS, KEYS if per_channel else 1))
    return q, k, torch.randn(num_tokens, HEADS, VALUES), g, torch.rand(num_tokens, HEADS)


def compare(rule, inputs, read, write, computed, counts):
    """`rule` and the twin, on the same step: results and all pages."""
    pages = torch.randn(12, HEADS, KEYS, VALUES)
    theirs = pages.clone()
    out = rule(*inputs, pages, state_step(read, write, computed, counts))
    want = gated_delta_rule(*inputs, theirs, state_step(read, write, computed, counts))
    torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(pages, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("per_channel", [False, True])
def test_prompts_pass_the_package(package, per_channel):
    torch.manual_seed(0)
    rule = delta_rule()
    # fresh and continued prompts, from page to page and in place
    compare(rule, example(30, per_channel), [0, 5], [3, 5], [0, 7], [11, 19])
    assert package.calls[-1] == [11, 19]
    # requests with one token before, between and after them, which keep their order and are computed once
    compare(rule, example(36, per_channel), [1, 2, 3, 0, 5], [1, 7, 3, 8, 5], [4, 4, 4, 0, 4], [1, 20, 1, 13, 1])
    assert package.calls[-1] == [20, 1, 13]


def test_short_prompts_and_single_tokens_stay(package):
    rule = delta_rule()
    compare(rule, example(20), [0], [1], [0], [20])
    package.calls.clear()
    compare(rule, example(3), [1, 2, 3], [1, 2, 3], [5, 5, 5], [1, 1, 1])
    compare(rule, example(9), [1, 2, 3], [1, 2, 3], [5, 5, 5], [3, 3, 3])  # drafts
    assert not package.calls


def test_stages_pass_one_after_another(package):
    torch.manual_seed(0)
    rule, inputs = by_stages(0, 1, 2, 3, 4)(delta_rule()), example(30)
    step, pages = state_step([0], [1], [0], [30]), torch.zeros(4, HEADS, KEYS, VALUES)
    parts = [
        (torch.arange(10), state_step([0], [2], [0], [10])),
        (torch.arange(10, 30), state_step([2], [1], [10], [20])),
    ]
    step.stages = parts
    out = rule(*inputs, pages, step)
    whole = torch.zeros_like(pages)
    want = gated_delta_rule(*inputs, whole, state_step([0], [1], [0], [30]))
    assert package.calls[-2:] == [[10], [20]]
    torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(pages[1], whole[1], atol=0.02, rtol=0.02)


def test_the_clock_decides_from_which_length_on(package, caplog):
    caplog.set_level(logging.INFO, "quire.worker.cuda.fla")
    slow = delta_rule(package=5)
    compare(slow, example(20), [0], [1], [0], [20])
    assert all(len(call) == 2 for call in package.calls), "the measurement's calls only"
    assert "by our own kernel (2 x 8 tokens: flash-linear-attention 9.9 5000.000 ms, own kernel 3000" in caplog.text
    package.calls.clear()
    only_long = fla.DeltaRule(gated_delta_rule, torch.float16, (4, 8), _slower_below(package, 8))
    compare(only_long, example(7), [0], [1], [0], [7])
    compare(only_long, example(9), [0], [1], [0], [9])
    assert package.calls[-1] == [9] and [7] not in package.calls
    assert "from 8 tokens on" in caplog.text and caplog.text.count("delta rule of prompts") == 2


def _slower_below(package, length):
    """A clock by which the package takes as long as its last call had tokens, backwards, and the own rule 5."""
    now, reads = 0, itertools.count()

    def read():
        nonlocal now
        i = next(reads)
        if i % 2:
            now += (1 if package.calls[-1][0] >= length else 9) if i // 6 % 2 == 0 else 5
        return now

    return read


def test_a_package_of_another_name_is_not_used(package, monkeypatch, caplog):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    compare(delta_rule(), example(20), [0], [1], [0], [20])
    assert "flash-linear-attention is not used" in caplog.text and "fla-core" in caplog.text


@pytest.mark.parametrize("fault", ["wrong", "none", "raises"])
def test_a_package_that_is_wrong_is_not_used(package, fault, caplog):
    good = package.gated

    def bad(*inputs, **others):
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        out, states = good(*inputs, **others)
        return out, states * (1.1 if fault == "wrong" else float("nan"))

    package.gated = bad
    rule = delta_rule()
    for _ in range(2):
        compare(rule, example(20), [0], [1], [0], [20])
    word = {"wrong": "its states differ by 0.", "none": "its states differ by nan", "raises": "no kernel image"}[fault]
    assert caplog.text.count(word) == 1 and "flash-linear-attention 9.9 is not used" in caplog.text


def test_models_in_16_bits_ask_for_it(package, monkeypatch):
    monkeypatch.setattr(install, "find_spec", lambda name: object())
    ops = install.TritonOps()
    own = ops.gated_delta_rule
    ops.use_packages(torch.bfloat16)
    assert isinstance(ops.gated_delta_rule.__wrapped__, fla.DeltaRule)
    ops.use_packages(torch.float32)
    assert ops.gated_delta_rule is own
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    ops.use_packages(torch.bfloat16)
    assert ops.gated_delta_rule is own
    TORCH.use_packages(torch.bfloat16)


REAL = importlib.util.find_spec("fla") is not None and importlib.util.find_spec("einops") is not None


@pytest.mark.skipif(not REAL, reason="the fla-core package is not installed")
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_real_package(per_channel, monkeypatch, caplog):
    from triton.runtime.autotuner import Autotuner

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1"
        monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **others: [1.0, 1.0, 1.0])
    ticks = clock().__next__
    rule = fla.DeltaRule(gated_delta_rule, torch.float16, (4, 8), ticks)
    monkeypatch.setattr(fla, "metadata", SimpleNamespace(version=lambda name: "0"))
    monkeypatch.setattr(sys.modules[__name__], "KEYS", 64)
    monkeypatch.setattr(sys.modules[__name__], "VALUES", 64)
    with torch.inference_mode():
        compare(rule, example(90, per_channel), [1, 0, 3, 5], [1, 4, 7, 5], [4, 0, 9, 3], [1, 70, 1, 18])
    if "InterpreterError" in caplog.text:
        pytest.skip("Triton's interpreter cannot run this version of the package")
    assert list(rule._least.values()) == [4]
