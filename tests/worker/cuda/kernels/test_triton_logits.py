"""worker/cuda/kernels/triton_logits.py under Triton's interpreter (compiled on a GPU) against plain torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.cuda.kernels import triton_logits, triton_split
from quire.worker.messages import SamplingParams
from quire.worker.platforms.base import TORCH
from quire.worker.platforms.ops import Ops
from quire.worker.sampling.logprobs import entries
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.sampling.test_sampler import make_batch, make_sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if DEVICE == "cuda" else [needs_loops])]
VOCAB = 300


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton_logits, "_TILE", 64)
    monkeypatch.setattr(triton_logits, "_COUNTED", 64)
    monkeypatch.setattr(triton_logits, "_BLOCK", 8)
    monkeypatch.setattr(KERNELS, "lib", None)
    monkeypatch.setattr(CpuPlatform, "ops", TORCH)


class Fused(Ops):
    """Plain torch with the two kernels."""

    def __init__(self):
        self.penalized = 0
        self.fused_penalize = lambda *tensors: self._on_device(triton_logits.penalize, tensors)
        self.fused_logprobs = lambda *args: triton_logits.logprobs(*args)

    def _on_device(self, function, tensors):
        self.penalized += 1
        logits, *rest = tensors
        changed = logits.to(DEVICE)
        function(changed, *(tensor.to(DEVICE) for tensor in rest))
        logits.copy_(changed)


KINDS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(temperature=0.0, repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, repeat_last_n=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.5, repeat_last_n=-1),
]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 3], [4], [1, 0]])
def test_penalties_are_those_of_plain_torch(rows, monkeypatch):
    """Bit for bit: prompts and outputs that share tokens, tokens of every tile, excluded ones."""
    samplers, kernels = [make_sampler(VOCAB, KINDS) for _ in range(2)], Fused()
    for sampler in samplers:
        generator = torch.Generator().manual_seed(5)
        table = sampler.table.token_table
        table.copy_(torch.randint(0, VOCAB, table.shape, generator=generator))
        table[:, ::3] = torch.randint(0, 9, table[:, ::3].shape, generator=generator).int()
        sampler.table.num_prompt_tokens[:] = [9 + row for row in range(len(sampler.table.num_prompt_tokens))]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(6)) * 4
    logits[0, 3:9], logits[-1, 4] = float("-inf"), 0.0
    positions = [9 + 5 * (row % 3) for row in rows]
    plain, fused = logits.clone(), logits.clone()
    for sampler, found in zip(samplers, (plain, fused)):
        for processor in sampler.processors:
            if processor.needed(batch := make_batch(rows, positions)):
                processor.apply(found, batch)
        monkeypatch.setattr(CpuPlatform, "ops", kernels)
    assert kernels.penalized == 1
    assert torch.equal(plain, fused) and not torch.equal(plain, logits)


class Host:
    """A platform that copies to the host."""

    def __init__(self, ops):
        self.ops, self.sums_by_row, self.copies = ops, False, 0

    def to_host(self, tensor):
        self.copies += 1
        return tensor.cpu()


@pytest.mark.parametrize("num", [0, 1, 7, 200])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("counters", [2, triton_logits.COUNTERS])
def test_logprobs_are_those_of_plain_torch(num, normalize, counters, monkeypatch):
    monkeypatch.setattr(triton_logits, "COUNTERS", counters)
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(5, VOCAB, generator=generator) * 5).to(DEVICE)
    logits[1, :70] = float("-inf")  # a whole tile
    logits[2, 1:] = float("-inf")
    logits[3] += 1000
    logits[4, 10:200] = logits[4, 9]  # equal ones do not come before a token
    token_ids = torch.tensor([299, 80, -1, 5, 9]).to(DEVICE)
    host = Host(Fused())
    got, want = (
        entries(logits, token_ids, num, normalize, host),
        entries(logits, token_ids, num, normalize, Host(Ops())),
    )
    assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.ranks, want.ranks) and host.copies == 1
    torch.testing.assert_close(got.values, want.values, atol=2e-5, rtol=1e-6)
    assert got.values.shape == (5, 1 + num) and got.values.dtype == torch.float32
    assert not triton_split.counters_of(logits.device).any()
    alone = entries(logits[3:4], token_ids[3:4], num, normalize, host)
    assert torch.equal(alone.values[0], got.values[3])


def test_a_row_without_any_token_has_no_number():
    logits = torch.full((1, VOCAB), float("-inf")).to(DEVICE)
    found = entries(logits, torch.tensor([-1]).to(DEVICE), 0, True, Host(Fused()))
    assert np.isnan(found.values.item()) and found.token_ids.item() == 0
