"""The sampler against an independent float64 reference of the distribution, and against itself in other batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NewRequest, SamplingParams
from quire.worker.sampling import arithmetic as sampling_math
from quire.worker.sampling import sampler as sampler_module
from quire.worker.sampling.sampler import Sampler

PLATFORM = CpuPlatform()


def make_sampler(vocab_size: int, params: list[SamplingParams], max_model_len: int = 64) -> Sampler:
    """A sampler whose row i samples with params[i]; every prompt is one token."""
    table = RequestTable(len(params), max_model_len, 16, vocab_size, PLATFORM)
    sampler = Sampler(table, PLATFORM)
    for row, sampling in enumerate(params):
        for state in (sampler.params, *sampler.processors, sampler.logprobs):
            state.add(row, NewRequest(row, [0], 1, [[1]], sampling))
    return sampler


def make_batch(rows: list[int], positions: list[int]) -> SamplingBatch:
    return SamplingBatch(rows, positions, torch.tensor(rows), torch.tensor(positions), torch.arange(len(rows)))


def draw(logits: torch.Tensor, sampling: SamplingParams, positions: list[int]) -> list[int]:
    """Return the tokens that one row of logits `[V]` gives at `positions`."""
    sampler = make_sampler(len(logits), [sampling])
    return sampler.sample(
        logits.expand(len(positions), -1).clone(), make_batch([0] * len(positions), positions)
    ).token_ids.tolist()


def reference(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """The distribution by its definition, in float64: sort, truncate, renormalize. Assumes distinct logits."""
    x = logits.double().numpy() / sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


# ---- random numbers


def _splitmix64(state: int, index: int) -> int:
    mask = (1 << 64) - 1
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix64_known_answers():
    # The first outputs of Vigna's reference implementation for the seed 1234567.
    assert [_splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_uniform_is_splitmix64(state, position):
    got = sampling_math.uniform(torch.tensor([state]), torch.tensor([position])).item()
    assert got == (_splitmix64(state % 2**64, position) >> 11) * 2.0**-53 and 0 <= got < 1


@given(st.integers(0, 2**64 - 1))
def test_seed_state_is_splitmix64_too(seed):
    assert sampling_math.seed_state(seed) % 2**64 == _splitmix64(seed, 0)


def test_streams_of_neighbouring_seeds_are_unrelated():
    states = torch.tensor([sampling_math.seed_state(seed) for seed in range(200)])
    u = torch.stack([sampling_math.uniform(states, torch.full((200,), position)) for position in range(200)])
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert (
        torch.corrcoef(u)[~torch.eye(200, dtype=torch.bool)].abs().max() < 0.35
        and torch.corrcoef(u.T)[~torch.eye(200, dtype=torch.bool)].abs().max() < 0.35
    )


# ---- the distribution


CASES = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.5, seed=2),
    SamplingParams(temperature=2.0, seed=3),
    SamplingParams(temperature=1.0, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5),
    SamplingParams(temperature=1.5, min_p=0.2, seed=6),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.7, min_p=0.05, seed=7),
    SamplingParams(temperature=1.0, top_p=1e-9, seed=8),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CASES, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
# the second is long enough for the search by blocks
@pytest.mark.parametrize("vocab_size, live", [(40, 40), (8192, 30)])
def test_distribution(vocab_size, live, sampling):
    generator = torch.Generator().manual_seed(sampling.seed)
    logits = torch.full((vocab_size,), -60.0)
    where = torch.randperm(vocab_size, generator=generator)[:live]
    logits[where] = torch.randn(live, generator=generator) * 1.5
    p = reference(logits, sampling)
    n = 8000 if vocab_size < 100 else 2000
    counts = np.bincount(draw(logits, sampling, list(range(n))), minlength=vocab_size)
    assert counts[p == 0].sum() == 0, "an excluded token was picked"
    big = p * n >= 5  # chi-square needs a handful of expected counts per cell; the rest share one
    expected, observed = np.append(p[big], p[~big].sum()) * n, np.append(counts[big], counts[~big].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1)).sum()
    freedom = max(big.sum(), 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.2, 3),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.one_of(st.just(0.0), st.floats(0, 0.9)),
    st.sampled_from([64, 100, 5000, 8192]),
)
def test_each_token_is_the_inverse_cdf_of_its_number(seed, temperature, top_k, top_p, min_p, vocab_size):
    """Draw by draw, not only on average: the picked token's CDF interval in the float64 reference contains the uniform
    number.
    """
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    token = draw(logits, sampling, [seed % 1000])[0]
    p = reference(logits, sampling)
    u = (_splitmix64(_splitmix64(seed, 0), seed % 1000) >> 11) * 2.0**-53
    cdf = np.cumsum(p)
    slack = 1e-3  # a nucleus may end one token earlier or later where its sum meets top_p within rounding
    assert cdf[token] - p[token] - slack <= u <= cdf[token] + slack


def test_top_k_of_one_and_tiny_top_p_are_greedy():
    logits = torch.randn(5000)
    for sampling in (
        SamplingParams(top_k=1, seed=3),
        SamplingParams(top_p=1e-12, seed=3),
        SamplingParams(temperature=1e-6, seed=3),
        SamplingParams(temperature=0),
    ):
        assert set(draw(logits, sampling, list(range(50)))) == {int(logits.argmax())}


def test_tokens_of_equal_weight_stay_together():
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0])
    assert set(draw(logits, SamplingParams(top_k=1), list(range(200)))) == {1, 2, 3}
    assert set(draw(logits, SamplingParams(top_p=0.1), list(range(200)))) == {1, 2, 3}


def test_top_k_of_the_whole_vocabulary_or_more_is_off():
    logits = torch.randn(100)
    assert draw(logits, SamplingParams(top_k=5000), list(range(50))) == draw(logits, SamplingParams(), list(range(50)))


def test_greedy_takes_the_first_of_equals():
    for vocab_size in (50, 8192, 5001):
        logits = torch.zeros(3, vocab_size)
        logits[1, [17, 33]] = 1.0
        logits[2, -1] = 5.0
        sampler = make_sampler(vocab_size, [SamplingParams(temperature=0)] * 3)
        assert sampler.sample(logits, make_batch([0, 1, 2], [1, 1, 1])).token_ids.tolist() == [0, 17, vocab_size - 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([64, 1000, 8192, 40000]), st.booleans())
def test_kth_weight_equals_sorting(seed, vocab_size, ties):
    generator = torch.Generator().manual_seed(seed)
    w = torch.rand(3, vocab_size, generator=generator) ** 4
    if ties:
        w = (w * 50).round() / 50
    amounts = torch.randint(0, 1000, (3, vocab_size), generator=generator)
    needed = (amounts.sum(1) * torch.rand(3, generator=generator)).long().clamp(min=1)
    got = sampling_math.kth_weight(w, amounts, needed)
    for row in range(3):
        order = w[row].argsort(descending=True)
        want = w[row][order][torch.searchsorted(amounts[row][order].cumsum(0), needed[row])]
        assert got[row] == max(float(want), 2.0**-40)


# ---- alone and in a crowd


def _mixed_params(seed: int) -> list[SamplingParams]:
    options = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"top_k": 3, "min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"top_k": 700},
        {"temperature": 0.3, "top_p": 0.5},
    ]
    return [SamplingParams(**{"temperature": 1.0, "seed": seed + i, **option}) for i, option in enumerate(options)]


@pytest.mark.parametrize("vocab_size", [64, 1003, 8192, 32000])
@pytest.mark.parametrize("coarse", [False, True])  # as logits in bfloat16 are: full of ties
def test_alone_and_in_a_crowd(vocab_size, coarse):
    params = _mixed_params(vocab_size)
    sampler = make_sampler(vocab_size, params)
    for trial in range(6):
        logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(trial)) * 4
        if coarse:
            logits = logits.bfloat16().float()
        positions = [5 + trial * 7 + i for i in range(len(params))]
        rows = torch.randperm(len(params)).tolist()
        crowd = sampler.sample(
            logits[rows].clone(), make_batch(rows, [positions[row] for row in rows])
        ).token_ids.tolist()
        for row, token in zip(rows, crowd):
            alone = sampler.sample(
                logits[row : row + 1].clone(), make_batch([row], [positions[row]])
            ).token_ids.tolist()
            assert alone == [token], (params[row], trial)


def test_cutting_the_batch_changes_nothing(monkeypatch):
    params = [SamplingParams(seed=i, top_p=0.9) for i in range(9)]
    logits = torch.randn(9, 500)
    tokens = []
    for elements in (1, 1500, 1 << 20):
        sampler = make_sampler(500, params)
        sampler._elements = elements
        tokens.append(sampler.sample(logits.clone(), make_batch(list(range(9)), [3] * 9)).token_ids.tolist())
    assert tokens[0] == tokens[1] == tokens[2]


def _filters(kind: str) -> dict[str, list]:
    top_p = [0.99, 0.9, 0.5, 0.3, 0.7, 0.95]
    return {
        "top_k": {"top_k": [1, 2, 5, 17, 20, 30]},
        "top_p": {"top_p": top_p},
        "both": {"top_k": [1, 30, 5, 17, 20, 2], "top_p": [1.0, *top_p[1:]]},
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("min_p", [False, True])
@pytest.mark.parametrize("kind", ["top_k", "top_p", "both"])
def test_blocks_and_the_whole_row_agree(kind, min_p, monkeypatch):
    """Both paths of `pick` agree, over ties and filters of every kind, also if blocks settle only some of the rows."""
    settled = 0
    for seed in range(24):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(6, 16384, generator=generator) * torch.tensor([[1.0], [3], [5], [2], [4], [6]])
        if seed % 2:
            logits = (logits * 8).round() / 8
        params = [
            SamplingParams(
                seed=seed * 10 + i,
                min_p=[0, 0.1, 0, 0.02, 0.3, 0][i] if min_p else 0,
                **{name: values[i] for name, values in _filters(kind).items()},
            )
            for i in range(6)
        ]
        rows = make_sampler(16384, params).params.gather(list(range(6)), torch.arange(6) + seed)
        num_blocks = sampling_math._blocks_to_search(rows, 128)
        _, certain = sampling_math._pick_from_blocks(logits.view(6, -1, 128), num_blocks, logits.amax(-1), rows)
        settled += int(certain.sum())
        _, tokens = sampling_math.pick(logits, rows)
        with monkeypatch.context() as patch:
            patch.setattr(sampling_math, "_blocks_to_search", lambda *args: 0)
            _, want = sampling_math.pick(logits, rows)
        assert tokens.tolist() == want.tolist()
    assert settled > 0 and (kind != "top_p" or settled < 24 * 6)


def test_blocks_decline_where_ties_might_escape_them():
    rows = make_sampler(16384, [SamplingParams(top_k=20)] * 2).params.gather([0, 1], torch.tensor([1, 2]))
    _, certain = sampling_math._pick_from_blocks(torch.zeros(2, 128, 128), 40, torch.zeros(2), rows)
    assert not certain.any()


@pytest.mark.parametrize("vocab_size", [100, 8192, 151936])
def test_largest(vocab_size):
    logits = torch.randn(3, vocab_size)
    for num in (1, 5, 20, 100):
        values, indices = sampling_math.largest(logits, num)
        assert torch.equal(values, logits.topk(num, -1).values) and torch.equal(logits.gather(1, indices), values)


# ---- what is not finite


def test_rows_without_a_token_are_marked_and_alone():
    logits = torch.randn(6, 100)
    logits[1, 5], logits[2], logits[3, 7] = float("nan"), float("-inf"), float("inf")
    for params in (
        [SamplingParams(temperature=0)] * 6,
        [SamplingParams(seed=i, top_p=0.9) for i in range(6)],
        [SamplingParams(seed=i, top_k=3) for i in range(6)],
    ):
        tokens = make_sampler(100, params).sample(logits.clone(), make_batch(list(range(6)), [1] * 6)).token_ids
        assert (tokens < 0).tolist() == [False, True, True, True, False, False]
    big = torch.randn(2, 8192)
    big[0, 700] = float("nan")
    for sampling in (SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams()):
        tokens = make_sampler(8192, [sampling] * 2).sample(big.clone(), make_batch([0, 1], [1, 1])).token_ids
        assert (tokens < 0).tolist() == [True, False]


# ---- logprobs


def _logprobs(sampler: Sampler, logits: torch.Tensor, rows: list[int]):
    sampled = sampler.sample(logits.clone(), make_batch(rows, [4] * len(rows)))
    return sampled.token_ids.tolist(), {
        i: messages[0] for part in sampled.logprobs for i, messages in part.messages().items()
    }


def test_logprobs_are_of_the_raw_logits():
    params = [
        SamplingParams(temperature=0.7, seed=1, logprobs=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(seed=5, logprobs=-1, top_k=2, logit_bias={3: 5.0}),
    ]
    logits = torch.randn(4, 50) * 2
    tokens, entries = _logprobs(make_sampler(50, params), logits, [0, 1, 2, 3])
    assert sorted(entries) == [0, 2, 3]
    for i, count in ((0, 3), (2, 0), (3, 50)):
        want = logits[i].log_softmax(-1)
        entry = entries[i]
        assert entry.token_ids[0] == tokens[i] and entry.token_ids[1:] == want.argsort(descending=True)[:count].tolist()
        torch.testing.assert_close(torch.tensor(entry.logprobs), want[entry.token_ids], atol=1e-5, rtol=1e-5)
        assert entry.rank == int((want > want[tokens[i]]).sum()) + 1


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_modes(mode):
    sampling = {"logprobs": 4, "logprobs_mode": mode, "logit_bias": {7: 3.0}}
    params = [SamplingParams(temperature=0.5, seed=1, top_k=6, **sampling), SamplingParams(temperature=0, **sampling)]
    logits = torch.randn(2, 50)
    tokens, entries = _logprobs(make_sampler(50, params), logits, [0, 1])
    want = logits.clone()
    if mode.startswith("processed"):
        want[:, 7] += 3
        want[0] /= 0.5
        want[0, want[0].argsort(descending=True)[6:]] = float("-inf")
    if mode.endswith("logprobs"):
        want = want.log_softmax(-1)
    for i in range(2):
        assert (
            entries[i].token_ids[0] == tokens[i]
            and entries[i].token_ids[1:] == want[i].argsort(descending=True)[:4].tolist()
        )
        torch.testing.assert_close(
            torch.tensor(entries[i].logprobs), want[i][entries[i].token_ids], atol=1e-5, rtol=1e-5
        )


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="logprobs_mode is 'cooked', but must be one of"):
        make_sampler(50, [SamplingParams(logprobs=1, logprobs_mode="cooked")])


def test_logprobs_take_bounded_memory(monkeypatch):
    """A few rows at a time give the same result. Copies of all logits, five of them, would exceed the memory plan."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            logprobs=i % 4,
            logprobs_mode=["raw_logprobs", "processed_logprobs"][i % 2],
            repetition_penalty=1.2,
            top_p=0.9,
        )
        for i in range(12)
    ]
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    want = _logprobs(make_sampler(50, params), logits, list(range(12)))
    sizes = []
    compute = sampler_module.entries
    monkeypatch.setattr(
        sampler_module, "entries", lambda logits, *args: (sizes.append(len(logits)), compute(logits, *args))[1]
    )
    monkeypatch.setattr(sampler_module, "_LOGPROBS_ELEMENTS", 4 * 50)
    got = _logprobs(make_sampler(50, params), logits, list(range(12)))
    assert sizes == [4, 2, 4, 2] and got == want
