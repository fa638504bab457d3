"""The Triton sampler under Triton's interpreter (compiled where there is a GPU) against the arithmetic of `sampling_math` and a float64 distribution."""

import pytest
import torch

pytest.importorskip("triton")
from tests.worker.test_sampler import make_batch, make_sampler
from worker import sampling_math
from worker.kernels import triton_sampler
from worker.messages import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton_sampler, "TILE", 64)


def tables(temperatures, seeds):
    """Of rows 2, 3, ... : the sampler gathers from tables that are longer than the batch."""
    temperature = torch.zeros(2 + len(temperatures), dtype=torch.float32)
    state = torch.zeros(2 + len(temperatures), dtype=torch.int64)
    temperature[2:] = torch.tensor(temperatures)
    state[2:] = torch.tensor([sampling_math.seed_state(seed) for seed in seeds])
    return torch.arange(2, 2 + len(temperatures)).to(DEVICE), temperature.to(DEVICE), state.to(DEVICE)


def sample(logits, temperatures, seeds, positions):
    rows, temperature, state = tables(temperatures, seeds)
    return triton_sampler.sample(logits.to(DEVICE), rows, torch.tensor(positions).to(DEVICE), temperature, state)


def test_greedy_is_the_first_of_the_largest():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    logits[1, [77, 78, 300]] = 9.0
    logits[2] = float("-inf")
    logits[2, 499] = -5.0
    logits[3, 10], logits[3, 400] = float("nan"), 50.0
    values, tokens = sample(logits, [0.0] * 4, [0] * 4, [5] * 4)
    assert tokens[:3].tolist() == [int(logits[0].argmax()), 77, 499]
    assert values[:3].tolist() == [float(logits[0].max()), 9.0, -5.0] and values[3].isnan()


def test_uniform_numbers_are_the_twins():
    """One weight per token and a flat distribution: the token tells the number that picked it."""
    size, num = 64 * 9, 40
    seeds, positions = list(range(num)), [7 * i % 50 for i in range(num)]
    _, tokens = sample(torch.zeros(num, size), [1.0] * num, seeds, positions)
    want = sampling_math.uniform(torch.tensor([sampling_math.seed_state(seed) for seed in seeds]), torch.tensor(positions)) * size
    assert tokens.tolist() == want.long().tolist() and len(set(tokens.tolist())) > num // 2


@pytest.mark.parametrize("size", [30, 64, 1000])
def test_inverts_the_cumulative_distribution(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(60, size, generator=generator) * 4
    logits[:, ::7] = float("-inf")
    temperatures = (torch.rand(60, generator=generator) * 2 + 0.05).tolist()
    seeds, positions = list(range(60)), torch.randint(0, 10**6, (60,), generator=generator).tolist()
    values, tokens = sample(logits, temperatures, seeds, positions)
    torch.testing.assert_close(values.cpu(), logits.amax(-1))
    cdf = (logits.double() / torch.tensor(temperatures).double()[:, None]).softmax(-1).cumsum(-1)
    u = sampling_math.uniform(torch.tensor([sampling_math.seed_state(seed) for seed in seeds]), torch.tensor(positions))
    for i, token in enumerate(tokens.tolist()):
        below = float(cdf[i, token - 1]) if token else 0.0
        assert logits[i, token] > float("-inf") and below - 1e-5 <= float(u[i]) <= float(cdf[i, token]) + 1e-5, i


def test_agrees_with_the_twin_and_with_itself_in_any_company():
    logits = torch.randn(24, 700, generator=torch.Generator().manual_seed(3)) * 3
    temperatures, seeds, positions = [0.7, 1.0, 1.5] * 8, list(range(24)), list(range(100, 124))
    _, tokens = sample(logits, temperatures, seeds, positions)
    u = sampling_math.uniform(torch.tensor([sampling_math.seed_state(seed) for seed in seeds]), torch.tensor(positions))
    scaled = logits.double() / torch.tensor(temperatures).double()[:, None]
    q = ((scaled - scaled.amax(-1, keepdim=True)).exp() * 2**40).long()
    sums = q.cumsum(-1)
    want = torch.searchsorted(sums, (u * sums[:, -1]).long()[:, None], right=True).squeeze(1)
    assert tokens.tolist() == want.tolist()
    _, alone = sample(logits[5:6], temperatures[5:6], seeds[5:6], positions[5:6])
    assert alone.tolist() == tokens[5:6].tolist()


def test_rows_without_any_token_and_extreme_temperatures():
    logits = torch.full((3, 200), float("-inf"))
    logits[1] = torch.arange(200.0)
    logits[2] = 0.0
    values, tokens = sample(logits, [1.0, 1e-4, 1e4], [1, 2, 3], [0, 1, 2])
    assert values[0] == float("-inf") and 0 <= int(tokens[0]) < 200
    assert int(tokens[1]) == 199 and 0 <= int(tokens[2]) < 200


def test_the_sampler_uses_it_for_rows_without_filters(monkeypatch):
    """With the kernel a sampler gives what it gives without: mixed batches, rows that change hands, one upload of the parameters per change."""
    if DEVICE == "cuda":
        pytest.skip("the CPU platform's sampler, which on a GPU has no interpreter")
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5), SamplingParams(temperature=1.3, top_p=0.8, seed=6), SamplingParams(temperature=1.0, top_k=4, seed=7),
             SamplingParams(temperature=0.9, seed=8), SamplingParams(temperature=1.0, min_p=0.2, seed=9)]
    plain, fused = make_sampler(300, kinds), make_sampler(300, kinds)
    fused.fused = triton_sampler.sample
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 3] = float("nan")
    for rows in ([0, 1, 2, 3, 4, 5], [1, 0], [5, 1], [4, 1]):
        outputs = [sampler.sample(logits[rows].clone(), make_batch(rows, [9 + row for row in rows])).token_ids.tolist() for sampler in (plain, fused)]
        assert outputs[0] == outputs[1] and (4 not in rows or outputs[0][rows.index(4)] == -1)
    tables = fused.params.tables()
    assert fused.params.tables() is tables
    fused.params.remove(1)
    assert fused.params.tables() is not tables and fused.params.tables()[0].tolist() == pytest.approx([0, 0, 1.3, 1.0, 0.9, 1.0])
