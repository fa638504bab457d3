"""The largest logits by way of a rounded copy of the head, against all logits: the same tokens always, and few blocks
of them computed where weights are like a model's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.worker.cpu import native_linear
from quire.worker.cpu.argmax_prefilter import BytesArgmaxPrefilter, Int8ArgmaxPrefilter
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import SamplingParams
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.weights.loader import load_weights
from tests.helpers.worker.steps import GREEDY, Script
from tests.worker.test_model_runner import BLOCK_SIZE, PLATFORM, make_runner, prompt, run

TINY_MODEL = Path(__file__).parents[3] / "configs" / "quire-tiny"


@pytest.fixture
def screened(native_kernels, monkeypatch):
    monkeypatch.setattr(Int8ArgmaxPrefilter, "MIN_WEIGHTS", 0)


def _twin(linear: native_linear.PackedLinear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, torch.float32).argmax(1)  # the first of the largest


def _largest(screen: Int8ArgmaxPrefilter, x: torch.Tensor) -> torch.Tensor | None:
    screen._pause = 0
    return screen.largest(x)


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 2, 7, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("n,k", [(1, 64), (31, 128), (32, 64), (1003, 192), (20000, 256), (9000, 2048)])
@pytest.mark.parametrize("compact", [True, False])
def test_same_tokens_as_of_all_logits(screened, m, n, k, compact):
    torch.manual_seed(n + m)
    linear = native_linear.PackedLinear((torch.randn(n, k) * 0.02).bfloat16(), compact=compact)
    screen = Int8ArgmaxPrefilter.from_linear(linear)
    for _ in range(3):
        x = torch.randn(m, k + 32).bfloat16()[:, :k]
        assert torch.equal(_largest(screen, x), _twin(linear, x))
        assert n < 20000 or screen.computed <= 0.01 * m * n / 32 + 1


@pytest.fixture
def byte_products(screened, native_kernels):
    if native_kernels.level not in ("avx512", "avx512bf16"):
        pytest.skip("no vectors multiply bytes")


@pytest.mark.slow
@pytest.mark.parametrize("m", [3, 4, 5, 12, 13, 32])
@pytest.mark.parametrize("n,k", [(31, 128), (1003, 192), (20000, 256), (9000, 2880)])
@pytest.mark.parametrize("group", [32, 64, 256, -1])
def test_same_tokens_of_a_weight_of_8_bits(byte_products, m, n, k, group):
    torch.manual_seed(n + m)
    weight = (torch.randn(n, k) * 0.02 * torch.rand(n, 1)).bfloat16()
    linear = native_linear.QuantizedLinear.quantize(weight, 8, group)
    screen = BytesArgmaxPrefilter.from_linear(linear)
    for sizes in (torch.ones(k), 10 ** torch.linspace(-2, 2, k)):
        x = (torch.randn(m, k) * sizes).bfloat16()
        assert torch.equal(_largest(screen, x), _twin(linear, x))
    assert n < 20000 or group < 0 or screen.computed <= 0.1 * m * n / 32
    assert screen.largest(x[:2]) is None  # both bytes are no slower


def test_weights_of_8_bits_that_are_not_screened(byte_products):
    weight = torch.randn(64, 64).bfloat16()
    quantize = native_linear.QuantizedLinear.quantize
    assert BytesArgmaxPrefilter.from_linear(quantize(weight, 8)) and not BytesArgmaxPrefilter.from_linear(
        quantize(weight, 4)
    )
    assert not BytesArgmaxPrefilter.from_linear(quantize(weight, 8, bias=torch.zeros(64)))
    assert not BytesArgmaxPrefilter.from_linear(quantize(weight, 8, narrow=True))  # one product per weight as it is
    values, scales = torch.ones(64, 64, dtype=torch.int8), torch.ones(64, 1)
    with_offsets = native_linear.QuantizedLinear.from_values(values, scales, torch.ones(64, 1), 8, -1)
    assert not BytesArgmaxPrefilter.from_linear(with_offsets)
    scales[3] = float("nan")
    assert not BytesArgmaxPrefilter.from_linear(native_linear.QuantizedLinear.from_values(values, scales, None, 8, -1))


@pytest.mark.parametrize(
    "case",
    [
        "outliers in x",
        "outliers in the weight",
        "sizes of x",
        "sizes of rows",
        "zeros",
        "one sign",
        "near ties",
        "small beside large",
    ],
)
def test_what_is_hard_to_tell_apart(screened, case):
    torch.manual_seed(0)
    n, k, m = 5000, 256, 20
    weight, x = torch.randn(n, k), torch.randn(m, k)
    if case == "outliers in x":
        x[:, 7] *= 300
    elif case == "outliers in the weight":
        weight[torch.randint(n, (300,)), torch.randint(k, (300,))] *= 1e4
    elif case == "sizes of x":
        x *= 10.0 ** torch.linspace(-20, 20, m)[:, None]
    elif case == "sizes of rows":
        weight *= 10.0 ** torch.linspace(-6, 2, n)[torch.randperm(n), None]
    elif case == "zeros":
        weight[: n // 2], x[::3], x[1, : k // 2] = 0, 0, 0
    elif case == "one sign":
        weight, x = -weight.abs(), x.abs()
    elif case == "small beside large":  # what only the lower bytes of x tell
        weight, x = weight * 0, torch.full((m, k), 0.003)
        weight[:, 0], x[:, 0] = torch.randint(1, 128, (n,)), 1
        weight[1234, 1:], weight[1234, 0] = 127, 100
    else:
        weight = weight[torch.arange(n) % 40] * (1 + 2**-7 * torch.randint(-1, 2, (n, k)))
    linear = native_linear.PackedLinear(weight.bfloat16())
    screen = Int8ArgmaxPrefilter(linear)
    for rows in (x[:1], x[:9], x):
        assert torch.equal(_largest(screen, rows.bfloat16()), _twin(linear, rows.bfloat16()))


@pytest.mark.parametrize("factor", [1, 30])
def test_of_equal_logits_the_first(screened, factor):
    """Whether those that come later have the same limits, or, because of weights that meet zeros, higher ones."""
    torch.manual_seed(1)
    weight, x = torch.randn(3000, 128).bfloat16(), torch.randn(8, 128).bfloat16()
    x[:, 100:] = 0
    best = _twin(native_linear.PackedLinear(weight), x)
    for row, token in enumerate(best.tolist()):
        weight[(token + 701 * (row + 1)) % 3000] = weight[token]
    weight[1::2, 100:] *= factor
    linear = native_linear.PackedLinear(weight)
    assert torch.equal(_largest(Int8ArgmaxPrefilter(linear), x), _twin(linear, x)) and not torch.equal(
        _twin(linear, x), best
    )


def test_rows_of_a_trained_model(screened):
    """The embedded model's own embeddings as hidden states: the limits mostly leave only the right block."""
    weight = load_file(TINY_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    linear = native_linear.PackedLinear(weight)
    screen, computed = Int8ArgmaxPrefilter(linear), 0
    for x in weight.split(1):
        assert torch.equal(_largest(screen, x), _twin(linear, x))
        computed += screen.computed
    assert computed <= 3 * len(weight)  # of 32 each


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_left_to_the_sampler(screened, value):
    weight, x = torch.randn(200, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    linear = native_linear.PackedLinear(weight)
    x[1, 5] = value
    assert Int8ArgmaxPrefilter(linear).largest(x) is None
    huge = native_linear.PackedLinear(torch.full((64, 64), 1e30).bfloat16())
    assert Int8ArgmaxPrefilter(huge).largest(torch.full((2, 64), 1e30).bfloat16()) is None
    weight[7, 9] = value
    assert Int8ArgmaxPrefilter.from_linear(native_linear.PackedLinear(weight)) is None


def test_who_has_none(screened, monkeypatch):
    weight = torch.randn(64, 64).bfloat16()
    assert Int8ArgmaxPrefilter.from_linear(native_linear.PackedLinear(weight)) and not Int8ArgmaxPrefilter.from_linear(
        native_linear.PackedLinear(weight, torch.zeros(64))
    )
    assert not Int8ArgmaxPrefilter.from_linear(
        native_linear.PackedLinear(torch.randn(64, 96).bfloat16())
    ) and not Int8ArgmaxPrefilter.from_linear(native_linear.PackedLinear(weight, gated="silu"))
    assert Int8ArgmaxPrefilter(native_linear.PackedLinear(weight)).largest(torch.randn(33, 64).bfloat16()) is None
    monkeypatch.setattr(Int8ArgmaxPrefilter, "MIN_WEIGHTS", 64 * 64 + 1)
    assert not Int8ArgmaxPrefilter.from_linear(native_linear.PackedLinear(weight))


def test_it_rests_where_it_does_not_help(screened):
    torch.manual_seed(0)
    # every block holds the largest
    linear = native_linear.PackedLinear(torch.randn(16, 64).bfloat16()[torch.arange(4000) % 16])
    screen, x = Int8ArgmaxPrefilter(linear), torch.randn(2, 64).bfloat16()
    assert torch.equal(screen.largest(x), _twin(linear, x)) and screen.computed == 125
    assert all(screen.largest(x) is None for _ in range(Int8ArgmaxPrefilter._PAUSE)) and screen.largest(x) is not None


def test_steps_that_want_only_the_largest_take_it(screened, checkpoint, monkeypatch):
    """Greedy requests get the tokens that they get of all logits; the others, and those beside them, get all."""
    folder = checkpoint("qwen3", dtype="bfloat16")
    spec = read_model_spec(folder)
    model = build_model(spec, torch.bfloat16, PLATFORM.device, 128, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    screen, calls = model.lm_head.prefilter, []
    assert model.lm_head.prefilter_data is screen.data
    monkeypatch.setattr(model.lm_head, "largest", lambda x: calls.append(ids := screen.largest(x)) or ids)

    def play(*extra: SamplingParams) -> tuple[list[list[int]], int]:
        calls.clear()
        runner, script = make_runner(model, spec.vocab_size, dtype=torch.bfloat16), Script(BLOCK_SIZE)
        for row, sampling in enumerate((GREEDY, GREEDY, GREEDY, *extra)):
            script.add(row, prompt(20 + row, row), sampling)
        run(runner, script, {row: len(script.rows[row].prompt) for row in script.rows})
        for _ in range(8):
            run(runner, script, dict.fromkeys(script.rows, 1))
        return [script.rows[row].outputs for row in range(3)], len(calls)

    tokens, number = play()
    assert number == 9
    for other in (
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, logit_bias={5: 1.0}),
    ):
        assert play(other) == (tokens, 0)
