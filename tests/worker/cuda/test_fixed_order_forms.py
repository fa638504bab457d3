"""`--deterministic` on GPUs, interpreted, for quantized weights, states, adapters of experts and images: a request has
the same bits alone, in a crowd, in chunks of any size and after preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.configs.config import Config
from quire.worker.cuda import fixed_order
from quire.worker.cuda.kernels.triton_quantized import multiply_blocks, multiply_groups
from quire.worker.cuda.kernels.triton_state_rows import square_sums
from quire.worker.cuda.kernels.triton_states import gated_delta_rule, linear_attention
from quire.worker.cuda.kernels.triton_tiles import multiply_tiles
from quire.worker.images.encoder import ImageEncoder
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.state import Span, StateStep
from quire.worker.messages import LoraUse, SamplingParams
from quire.worker.worker import Worker
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import build_family
from tests.helpers.models.lora import make_expert_adapter
from tests.helpers.worker import quantized_checkpoints as quantized
from tests.helpers.worker.emulated_gpu import EmulatedGpu, emulated
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.cuda.kernels.test_triton_tiles import stored, tiled, weight_of
from tests.worker.cuda.test_fixed_order import DEVICE, SIZES, _play

gguf = pytest.importorskip("gguf")

pytestmark = [needs_loops, pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")]


@pytest.mark.parametrize(
    "kind, group, multiply, form",
    [
        ("int8", 32, multiply_groups, stored),
        ("e4m3", None, multiply_groups, stored),
        ("zeros", 64, multiply_tiles, tiled),
        ("e2m1", 64, multiply_tiles, tiled),
    ],
)
def test_rows_of_a_quantized_product_are_independent(kind, group, multiply, form):
    weight, x = form(weight_of(kind, 48, 256, group)), torch.randn(70, 256, device=DEVICE)
    together = multiply(x, weight, fixed_order=True)
    torch.testing.assert_close(together, multiply(x, weight), atol=1e-4, rtol=1e-4)
    for rows in (slice(5, 6), slice(40, 70), slice(3, 68)):
        assert torch.equal(multiply(x[rows], weight, fixed_order=True), together[rows])


def test_rows_of_a_product_with_blocks_are_independent():
    values = np.random.default_rng(0).standard_normal((32, 256), dtype=np.float32)
    blocks = torch.from_numpy(gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0)).to(DEVICE)
    x = torch.randn(70, 256, device=DEVICE)

    def run(rows: slice) -> torch.Tensor:
        out = x.new_empty(len(x[rows]), 32)
        multiply_blocks(x[rows], blocks, "Q4_0", out, fixed_order=True)
        return out

    together = run(slice(0, 70))
    for rows in (slice(5, 6), slice(40, 70)):
        assert torch.equal(run(rows), together[rows])


def _step(counts: list[int], fresh: list[bool], read: list[int], write: list[int]) -> StateStep:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    begins = starts.tolist()
    spans = [Span(i, begins[i], begins[i + 1], fresh[i]) for i, n in enumerate(counts) if n > 1]
    ones = [i for i, n in enumerate(counts) if n == 1]
    places = torch.tensor(ones), torch.tensor([begins[i] for i in ones])
    return StateStep(torch.tensor(read), torch.tensor(write), torch.tensor(fresh), starts, spans, places)


@pytest.mark.parametrize("delta", [True, False])
def test_tokens_pass_a_state_alike_in_any_step(delta):
    """As one prompt, in chunks of which some have one token, and beside others."""
    tokens, heads, dk, dv = 23, 2, 16, 24
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, dk), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(tokens, heads, dv), -torch.rand(tokens, heads), torch.rand(tokens, heads)

    def run(pages, step, index):
        if delta:
            inputs = q[index], k[index], v[index], g[index][..., None], beta[index]
            return gated_delta_rule(*inputs, pages, step, fixed_order=True)
        return linear_attention(q[index], k[index], v[index], g[index], pages, step, fixed_order=True)

    whole_pages = torch.zeros(4, heads, dk, dv)
    whole = run(whole_pages, _step([tokens], [True], [0], [1]), torch.arange(tokens))
    pages = torch.zeros(4, heads, dk, dv)
    parts = []
    for start, stop in ((0, 9), (9, 10), (10, 22), (22, 23)):
        mine, other = torch.arange(start, stop), torch.arange(5)
        step = _step([5, stop - start], [True, start == 0], [0, 1], [2, 1])
        parts.append(run(pages, step, torch.cat([other, mine]))[5:])
    assert torch.equal(torch.cat(parts), whole) and torch.equal(pages[1], whole_pages[1])


def test_sums_of_rows_do_not_depend_on_their_number():
    x = torch.randn(40, 3, 100)
    together = square_sums(x)
    torch.testing.assert_close(together, x.square().sum(-1, keepdim=True))
    assert torch.equal(square_sums(x[7:8]), together[7:8])


def _check(folder: str, adapters: list[LoraUse] | None = None, **settings) -> None:
    sampling = SamplingParams(temperature=0.9, seed=11, logprobs=2, speculation=False)
    with emulated(EmulatedGpu()):
        worker = Worker(Config.from_flat(model=folder, deterministic=True, **SIZES, **settings))
        worker.initialize(lambda phase, fraction: None)
        assert worker.runner.backend.name == "triton_fixed"
        alone = _play(worker, sampling, adapters=adapters)
        assert len(alone[1]) == 3
        for case in ({"crowd": 3}, {"chunk": 9, "crowd": 1, "preempt_at": 2}):
            assert _play(worker, sampling, adapters=adapters, **case) == alone, case
        worker.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        quantized.fp8(None),
        quantized.fp8(32),
        quantized.awq(32),
        quantized.gptq(4, 32, act_order=True),
        quantized.modelopt_nvfp4(),
    ],
    ids=["fp8", "fp8 blocks", "awq", "gptq", "nvfp4"],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_quantized_checkpoints(name, form, checkpoint, tmp_path):
    sizes = {"num_experts": 4} if name == "qwen3-moe" else {}
    folder = quantized.write(checkpoint(name, num_hidden_layers=1, **sizes), tmp_path / "forms", *form)
    _check(str(Path(folder, "quantized")))


def _generated(folder: str, prompts: list[list[int]], **settings):
    """Return the tokens of the last prompt and their log-probabilities."""
    sampling = SamplingParams(max_tokens=2, temperature=0.9, seed=11, logprobs=2, ignore_eos=True, speculation=False)
    engine = InProcessEngine(folder, deterministic=True, **SIZES | settings)
    assert engine.executor._worker.runner.backend.name == "triton_fixed"
    *_, last = engine.generate(prompts, sampling)
    engine.close()
    assert last.error is None
    return last.token_ids, last.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "granite4-mamba", "jamba", "kimi_linear", "lfm2"])
def test_recurrent_states(name, tmp_path):
    folder = build_family(name, tmp_path)
    prompts = [[(7 * i + 5 + j) % 120 for j in range(5 + 4 * i)] for i in range(3)]
    with emulated(EmulatedGpu()):
        alone = _generated(folder, prompts[-1:])
        assert _generated(folder, prompts) == alone
        assert _generated(folder, prompts[1:], max_num_batched_tokens=8) == alone


@pytest.mark.slow
def test_adapters_of_experts(checkpoint, tmp_path):
    folder = checkpoint("qwen3-moe", num_experts=4, num_hidden_layers=1)
    adapter = make_expert_adapter(tmp_path / "adapter", folder)
    _check(folder, [LoraUse(str(adapter), str(adapter), 1.0)], enable_lora=True)


@dataclass
class _Item:
    key: str
    path: Path
    num_embeds: int


@pytest.mark.parametrize("alone", [False, True])
def test_images_are_encoded_alone(alone, tmp_path):
    batches: list[int] = []

    def encode(features):
        batches.append(len(features))
        return [one["x"] for one in features]

    items = []
    for i in range(3):
        save_file({"x": torch.full((2 + i, 4), float(i))}, tmp_path / f"{i}")
        items.append(_Item(str(i), tmp_path / f"{i}", 2 + i))
    encoder = ImageEncoder(SimpleNamespace(encode=encode, one_by_one=alone), EmulatedGpu())
    assert not encoder.encode(items)
    assert batches == ([1, 1, 1] if alone else [3])
    assert [len(encoder.embeddings[str(i)]) for i in range(3)] == [2, 3, 4]


def test_weights_without_such_a_product_are_refused():
    layer = Linear(4, 4, False, _Odd())
    with pytest.raises(ValueError, match=r"--deterministic has no product for weights of this form \(_Odd\)"):
        fixed_order.fix_order(torch.nn.ModuleList([layer]))


class _Odd(LinearMethod):
    def create_weights(self, layer):
        layer.weight = None
