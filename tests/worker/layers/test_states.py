"""Recurrent states: chunks of any size give what the formula gives token by token, and states stay apart."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from quire.worker.attention.base import AttentionMetadata
from quire.worker.cpu import build, native
from quire.worker.cpu.install import NativeOps
from quire.worker.layers.rowwise import l2_norm
from quire.worker.layers.state import StateStep, StateSteps
from quire.worker.layers.states.delta_rule import delta_one
from quire.worker.layers.states.linear_attention import linear_one
from quire.worker.layers.states.selective_scan import scan_one
from quire.worker.layers.states.short_conv import own_conv, spaced_conv
from quire.worker.platforms.ops import Ops

LENGTH, HEADS, KEYS, VALUES = 150, 4, 8, 12


def state_step(read: list[int], write: list[int], computed: list[int], counts: list[int]) -> StateStep:
    """The step of requests that read and write these pages, of which `counts` tokens follow `computed` ones."""
    starts, lengths = [0, *accumulate(counts)], [c + n for c, n in zip(computed, counts)]
    table = torch.tensor([read, write], dtype=torch.int32).t()
    meta = AttentionMetadata(
        StateSteps(),
        torch.zeros(sum(counts), dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        max(counts),
        max(lengths),
        host=(starts, lengths),
    )
    meta.backend.build(meta)
    return meta.extra


def _convolution():
    weight, bias = torch.randn(4, KEYS), torch.randn(KEYS)

    def formula(x):
        padded = F.pad(x.t()[None], (3, 0))
        return F.silu(F.conv1d(padded, weight.t()[:, None], bias, groups=KEYS)[0].t())

    def run(ops, pages, step, x):
        return ops.causal_conv(x, weight, bias, pages, step, silu=True)

    return (3, KEYS), (torch.randn(LENGTH, KEYS),), formula, run


def _spaced_convolution():
    weight, apart = torch.randn(4, KEYS), 3

    def formula(x):
        padded = F.pad(x.t()[None], (3 * apart, 0))
        return F.conv1d(padded, weight.t()[:, None], groups=KEYS, dilation=apart)[0].t()

    return (
        (3 * apart, KEYS),
        (torch.randn(LENGTH, KEYS),),
        formula,
        lambda ops, pages, step, x: spaced_conv(x, weight, pages, step, apart),
    )


def _own_convolution():
    weight = torch.randn(4, KEYS)

    def formula(x, taps):
        behind = torch.stack([F.pad(x, (0, 0, lag, 0))[:LENGTH] for lag in range(4)], -1)  # [T, C, lag]
        return (behind * (weight.t() + taps.repeat_interleave(KEYS // HEADS, 1))).sum(-1)

    return (
        (3, KEYS),
        (torch.randn(LENGTH, KEYS), torch.randn(LENGTH, HEADS, 4)),
        formula,
        lambda ops, pages, step, x, taps: own_conv(x, taps, weight, pages, step),
    )


def _token_by_token(shape, one):
    def formula(*inputs):
        state, outputs = torch.zeros(1, *shape), []
        for t in range(LENGTH):
            now = [x[t : t + 1] for x in inputs]
            if len(shape) == 3:  # two value heads per key head
                now[:2] = (x.repeat_interleave(2, 1) for x in now[:2])
            out, state = one(state, *now)
            outputs.append(out)
        return torch.cat(outputs)

    return formula


def _delta(per_channel: bool):
    q, k = (l2_norm(torch.randn(LENGTH, HEADS // 2, KEYS)) for _ in range(2))
    g = -F.softplus(3 * torch.randn(LENGTH, HEADS, KEYS if per_channel else 1))
    inputs = q, k, torch.randn(LENGTH, HEADS, VALUES), g, torch.rand(LENGTH, HEADS) * 2
    shape = HEADS, KEYS, VALUES
    return (
        shape,
        inputs,
        _token_by_token(shape, delta_one),
        lambda ops, pages, step, *x: ops.gated_delta_rule(*x, pages, step),
    )


def _linear():
    q, k = (torch.randn(LENGTH, HEADS // 2, KEYS) for _ in range(2))
    inputs = q, k, torch.randn(LENGTH, HEADS, VALUES), -F.softplus(3 * torch.randn(LENGTH, HEADS))
    shape = HEADS, KEYS, VALUES
    return (
        shape,
        inputs,
        _token_by_token(shape, linear_one),
        lambda ops, pages, step, *x: ops.linear_attention(*x, pages, step),
    )


def _scan():
    a = -torch.rand(KEYS, VALUES) * 4
    x, dt = torch.randn(LENGTH, KEYS), F.softplus(torch.randn(LENGTH, KEYS))
    inputs = x, dt, torch.randn(LENGTH, VALUES), torch.randn(LENGTH, VALUES)

    def run(ops, pages, step, x, dt, b, c):
        return ops.selective_scan(x, dt, a, b, c, pages, step)

    return (KEYS, VALUES), inputs, _token_by_token((KEYS, VALUES), lambda *args: scan_one(a, *args)), run


RECURRENCES = {
    "convolution": _convolution,
    "convolution of tokens apart": _spaced_convolution,
    "convolution with weights of each token": _own_convolution,
    "delta": lambda: _delta(False),
    "delta per channel": lambda: _delta(True),
    "linear": _linear,
    "scan": _scan,
}


@pytest.fixture(params=["torch", "native"])
def ops(request, monkeypatch):
    """The plain operations, or those of the kernels."""
    if request.param == "torch":
        return Ops
    if build.cpu_level() is None or build.compiler() is None:
        pytest.skip("no native kernels here")
    loaded = native.Kernels()
    assert loaded.load(background=False), loaded.status
    monkeypatch.setattr(native.KERNELS, "lib", loaded.lib)
    return NativeOps


@pytest.mark.parametrize("activated", [False, True])
def test_wide_convolutions(activated, ops):
    """Of more channels than a piece of work has, and of no whole vector: one request, and the same bits in two."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, 1101), torch.randn(4, 1101), torch.randn(1101)
    pages = torch.zeros(4, 3, 1101)
    alone = ops.causal_conv(x, weight, bias, pages, state_step([0], [1], [0], [70]), activated)
    want = Ops.causal_conv(x, weight, bias, pages.clone(), state_step([0], [1], [0], [70]), activated)
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(pages[1], x[-3:])
    both = ops.causal_conv(x.repeat(2, 1), weight, bias, pages, state_step([0, 0], [2, 3], [0, 0], [70, 70]), activated)
    torch.testing.assert_close(both, alone.repeat(2, 1), atol=0 if ops is not Ops else 1e-5, rtol=0)


@pytest.mark.parametrize("channels", [32, 77, 600])
def test_convolutions_of_16_bits_have_the_bits_of_32(channels, ops):
    """Inputs are columns of a wider matrix; requests with fewer tokens than the convolution reads, too."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, channels + 32).bfloat16()[:, 16 : channels + 16], torch.randn(4, channels)
    steps = [([0, 0, 0], [1, 2, 3], [0, 0, 0], [30, 1, 9]), ([1, 2, 3], [4, 2, 5], [30, 1, 9], [1, 2, 37])]
    results = []
    for inputs in (x, x.float()):
        pages = torch.zeros(6, 3, channels)
        results.append([ops.causal_conv(inputs, weight, None, pages, state_step(*step), True) for step in steps])
        results[-1].append(pages)
    for ours, theirs in zip(*results):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, LENGTH])
@pytest.mark.parametrize("name", RECURRENCES)
def test_chunks_of_any_size_equal_the_formula(name, chunk, ops):
    """Two requests, of which one is always a token behind, whose pages change from chunk to chunk."""
    torch.manual_seed(0)
    shape, inputs, formula, run = RECURRENCES[name]()
    want = formula(*inputs)
    pages = torch.full((6, *shape), float("nan"))
    outputs, read = [], [0, 0]
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        counts = [stop - start, (stop - start) - (start == 0)]
        write = [1 + (start // chunk) % 2, 3 + (start // chunk) % 2]
        late = max(start - 1, 0)
        both = [torch.cat([x[start:stop], x[late : late + counts[1]]]) for x in inputs]
        if not counts[1]:
            counts, write, read = counts[:1], write[:1], read[:1]
        out = run(ops, pages, state_step(read, write, [start, late][: len(counts)], counts), *both)
        outputs.append(out[: counts[0]])
        if len(counts) > 1:
            torch.testing.assert_close(out[counts[0] :], want[late : late + counts[1]], atol=1e-4, rtol=1e-4)
        read = [write[0], write[1] if len(write) > 1 else 0]
    torch.testing.assert_close(torch.cat(outputs), want, atol=1e-4, rtol=1e-4)
    assert pages[5].isnan().all(), "a page of no request was written"


def test_a_checkpoint_is_read_by_several_requests_and_stays(ops):
    torch.manual_seed(0)
    shape, inputs, formula, run = _delta(False)
    want, pages = formula(*inputs), torch.zeros(6, *shape)
    run(ops, pages, state_step([0], [1], [0], [100]), *(x[:100] for x in inputs))
    kept = pages[1].clone()
    for counts in ([1, 50], [50, 50]):
        both = [torch.cat([x[100 : 100 + n] for n in counts]) for x in inputs]
        out = run(ops, pages, state_step([1, 1], [2, 3], [100, 100], counts), *both)
        torch.testing.assert_close(out, torch.cat([want[100 : 100 + n] for n in counts]), atol=1e-4, rtol=1e-4)
    assert torch.equal(pages[1], kept)


def test_padding_rows_write_to_the_null_page_only(ops):
    torch.manual_seed(0)
    shape, inputs, _, run = _delta(False)
    pages = torch.zeros(4, *shape)
    run(ops, pages, state_step([0, 0, 0], [2, 0, 0], [0, 0, 0], [1, 1, 1]), *(x[:3] for x in inputs))
    assert pages[2].any() and not pages[1].any() and not pages[3].any()
