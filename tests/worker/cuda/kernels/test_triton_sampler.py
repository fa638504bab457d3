"""The Triton sampler under Triton's interpreter (compiled on a GPU) against the arithmetic of `sampling_math` and a
float64 distribution.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.cuda.kernels import triton_sampler, triton_split
from quire.worker.messages import SamplingParams
from quire.worker.platforms.base import TORCH
from quire.worker.platforms.ops import Ops
from quire.worker.sampling import arithmetic as sampling_math
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.sampling.test_sampler import make_batch, make_sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton_sampler, "TILE", 64)
    monkeypatch.setattr(KERNELS, "lib", None)  # the twin is plain torch, even if another module loaded the kernels


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """The twin is plain torch, also after a test that loaded the native kernels, whose exponential is another."""
    monkeypatch.setattr(CpuPlatform, "ops", TORCH)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_sampled_as_the_same_numbers_in_float32(dtype):
    logits = (torch.randn(6, 700, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    logits[5, 6] = float("inf")
    rows, temperature, state = tables([0.0, 0.7, 1.0, 1.0, 0.5, 1.0], range(6))
    num = len(temperature)
    filters = torch.zeros(num, dtype=torch.int64), torch.full((num,), 0.8).double(), torch.zeros(num)
    positions = torch.arange(6).to(DEVICE)
    for tables_of_filters in ((), [table.to(DEVICE) for table in filters]):
        args = rows, positions, temperature, state, *tables_of_filters
        values, tokens = triton_sampler.sample(logits.to(DEVICE), *args)
        want_values, want = triton_sampler.sample(logits.float().to(DEVICE), *args)
        assert torch.equal(tokens, want) and torch.equal(values, want_values) and values.dtype == torch.float32
        assert tokens[5] == -1 and (tokens[:5] >= 0).all()


def test_uniform_numbers_are_the_twins():
    """One weight per token and a flat distribution: the token tells the number that picked it."""
    size, num = 64 * 9, 40
    seeds, positions = list(range(num)), [7 * i % 50 for i in range(num)]
    _, tokens = sample(torch.zeros(num, size), [1.0] * num, seeds, positions)
    want = (
        sampling_math.uniform(torch.tensor([sampling_math.seed_state(seed) for seed in seeds]), torch.tensor(positions))
        * size
    )
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


@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_are_appended_to_the_table(filtered):
    """As `Ops.append_tokens` does: nothing at the end of a row, and 0 for a row without a token."""
    rows, temperature, state = tables([0.0, 0.9, 0.0], range(3))
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[2] = float("-inf")
    num = len(temperature)
    filters = torch.zeros(num, dtype=torch.int64), torch.full((num,), 0.8).double(), torch.zeros(num)
    filters = [table.to(DEVICE) for table in filters] if filtered else []
    for positions in ([4, 0, 7], [8, 5, 0]):
        positions = torch.tensor(positions).to(DEVICE)
        got, want = (torch.full((num, 8), 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
        _, token_ids = triton_sampler.sample(logits, rows, positions, temperature, state, *filters, tokens=got)
        Ops().append_tokens(want, rows, positions, token_ids, 8)
        assert torch.equal(got, want) and token_ids[2] == -1


def test_counters_are_zero_again_and_many_rows_take_them_in_turn(monkeypatch):
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(2))
    temperatures, seeds, positions = [0.0, 0.9, 1.0, 0.0, 2.0, 0.5, 1.0], list(range(7)), list(range(7))
    values, tokens = sample(logits, temperatures, seeds, positions)
    assert not triton_split.counters_of(values.device).any()
    monkeypatch.setattr(triton_sampler, "COUNTERS", 3)
    in_parts = sample(logits, temperatures, seeds, positions)
    assert torch.equal(in_parts[0], values) and torch.equal(in_parts[1], tokens)


def test_rows_without_any_token_and_extreme_temperatures():
    logits = torch.full((3, 200), float("-inf"))
    logits[1] = torch.arange(200.0)
    logits[2] = 0.0
    values, tokens = sample(logits, [1.0, 1e-4, 1e4], [1, 2, 3], [0, 1, 2])
    assert values[0] == float("-inf") and tokens[0] == -1
    assert int(tokens[1]) == 199 and 0 <= int(tokens[2]) < 200


@needs_loops
def test_the_sampler_uses_it_for_all_rows():
    """A sampler gives the same result with and without the kernel: mixed batches, reassigned rows, one upload of the
    parameters per change.
    """
    if DEVICE == "cuda":
        pytest.skip("the CPU platform's sampler, which on a GPU has no interpreter")
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.3, top_p=0.8, seed=6),
        SamplingParams(temperature=1.0, top_k=4, seed=7),
        SamplingParams(temperature=0.9, seed=8),
        SamplingParams(temperature=1.0, min_p=0.2, seed=9),
    ]
    plain, fused = make_sampler(300, kinds), make_sampler(300, kinds)
    fused.fused = triton_sampler.sample
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 3] = float("nan")
    for rows in ([0, 1, 2, 3, 4, 5], [1, 0], [5, 1], [4, 1]):
        outputs = [
            sampler.sample(logits[rows].clone(), make_batch(rows, [9 + row for row in rows])).token_ids.tolist()
            for sampler in (plain, fused)
        ]
        assert outputs[0] == outputs[1] and (4 not in rows or outputs[0][rows.index(4)] == -1)
    tables = fused.params.tables()
    assert fused.params.tables() is tables
    fused.params.remove(1)
    assert fused.params.tables() is not tables and fused.params.tables()[0].tolist() == pytest.approx(
        [0, 0, 1.3, 1.0, 0.9, 1.0]
    )


@pytest.fixture
def twin_weights(monkeypatch):
    """The interpreter's exponential for the twin: everything behind it is integers, and must be the same."""
    monkeypatch.setattr(
        sampling_math,
        "_weights",
        lambda logits, maximum, rows: torch.from_numpy(
            np.exp(((logits - maximum[:, None]) / rows.temperature[:, None]).numpy())
        ),
    )


def random_logits(num_rows, size, generator):
    """Spread and nearly flat rows, ties, masks, single tokens."""
    logits = (
        torch.randn(num_rows, size, generator=generator)
        * torch.tensor([0.1, 1.0, 3.0, 8.0])[torch.arange(num_rows) % 4, None]
    )
    for i in range(num_rows):
        if i % 3 == 0:
            logits[i] = (logits[i] * 2).round() / 2
        if i % 5 == 0:
            logits[i, torch.randperm(size, generator=generator)[: size * 3 // 4]] = float("-inf")
        if i % 11 == 0:
            logits[i] = 1.5
        if i % 13 == 0:
            logits[i] = float("-inf")
            logits[i, i % size] = -3.0
    return logits


def compare(size, params, generator, positions=None):
    """The fused sampler's tokens and the twin's; on a GPU, whose exponential is another, few may differ."""
    plain, fused = make_sampler(size, params), make_sampler(size, params)
    calls = []

    def sample_on_device(*args, tokens):
        calls.append(len(args))
        table = tokens.to(DEVICE)
        found = triton_sampler.sample(*(x.to(DEVICE) for x in args), tokens=table)
        tokens.copy_(table)
        return tuple(x.to("cpu") for x in found)

    fused.fused = sample_on_device
    rows = list(range(len(params)))
    batch = make_batch(rows, positions or [7 + 3 * row for row in rows])
    logits = random_logits(len(rows), size, generator)
    want, got = (sampler.sample(logits.clone(), batch).token_ids.tolist() for sampler in (plain, fused))
    assert calls == [8 if fused.params.any_filter(rows) else 5], "one call for all rows, and nothing done over"
    differ = [(row, params[row]) for row in rows if want[row] != got[row]]
    assert len(differ) <= (len(rows) // 50 if DEVICE == "cuda" else 0), differ
    return got


TOP_K, TOP_P, MIN_P = [0, 1, 3, 20, 10**6], [1.0, 0.95, 0.5, 1e-6, 0.9999], [0.0, 0.0, 0.02, 0.7, 1.0]


@needs_loops
@pytest.mark.parametrize("size, candidates", [(30, 4096), (700, 4096), (1000, 16), (200, 1)])
def test_filters_are_the_twins(size, candidates, monkeypatch, twin_weights):
    """Every combination of filters, in one batch with greedy rows and rows without filters; with few candidates rows
    fall back to bisection.
    """
    monkeypatch.setattr(triton_sampler, "CANDIDATES", candidates)
    if candidates < 4096:
        monkeypatch.setattr(triton_sampler, "TILE", 256)
    generator = torch.Generator().manual_seed(size)
    pick = lambda values: values[int(torch.randint(len(values), (1,), generator=generator))]  # noqa: E731
    params = [
        SamplingParams(
            temperature=pick([0.0, 0.3, 1.0, 2.5]),
            top_k=pick([*TOP_K, size - 1, size]),
            top_p=pick(TOP_P),
            min_p=pick(MIN_P),
            seed=i,
        )
        for i in range(50 if candidates >= 4096 else 25)
    ]
    compare(size, params, generator)


@needs_loops
def test_a_large_vocabulary(monkeypatch, twin_weights):
    """Qwen3's, with the tiles that a GPU uses: what is collected suffices for usual settings, not for a flat
    distribution.
    """
    monkeypatch.setattr(triton_sampler, "TILE", 4096)
    params = [
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
        SamplingParams(top_p=0.9, seed=2),
        SamplingParams(min_p=0.05, seed=3),
        SamplingParams(top_k=1000, seed=4),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=6),
        SamplingParams(temperature=1.5, top_p=0.99, seed=7),
    ]
    compare(151936, params, torch.Generator().manual_seed(5))


@needs_loops
def test_every_number_picks_the_twins_token(monkeypatch, twin_weights):
    """One row at many positions: tokens of the head and of the tail of the kept tokens."""
    monkeypatch.setattr(triton_sampler, "CANDIDATES", 64)
    monkeypatch.setattr(triton_sampler, "TILE", 512)
    tokens = compare(
        300,
        [SamplingParams(temperature=2.0, top_k=40, top_p=0.9, seed=9)] * 40,
        torch.Generator().manual_seed(2),
        [31 * i for i in range(40)],
    )
    assert len(set(tokens)) > 10


@needs_loops
def test_filtered_rows_without_a_finite_largest_logit():
    sampler = make_sampler(200, [SamplingParams(top_p=0.5, seed=i) for i in range(4)])
    sampler.fused = triton_sampler.sample
    logits = torch.zeros(4, 200)
    logits[0], logits[1, 5], logits[2, 7] = float("-inf"), float("nan"), float("inf")
    if DEVICE == "cpu":
        assert sampler.sample(logits, make_batch([0, 1, 2, 3], [1, 2, 3, 4])).token_ids.tolist()[:3] == [-1, -1, -1]
