"""llama.cpp's samplers next to their definitions: equal distributions, and tokens that are drawn from them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import SAMPLERS, Dry, NewRequest, SamplerChain, SamplingParams
from quire.worker.sampling import arithmetic
from quire.worker.sampling.chain import dry as dry_module
from quire.worker.sampling.chain.rows import _XTC_STREAM
from quire.worker.sampling.sampler import Sampler
from tests.worker.sampling.chain.reference import Chain, dry_penalties
from tests.worker.sampling.test_sampler import make_batch

VOCAB_SIZE = 96
INF = math.inf


def sampler_of(requests: list[tuple[list[int], SamplingParams]], vocab_size: int = VOCAB_SIZE) -> Sampler:
    """A sampler with rows 0, 1 ... of these contexts and parameters."""
    table = RequestTable(len(requests), 256, 16, vocab_size, CpuPlatform(), num_blocks=99)
    sampler = Sampler(table, CpuPlatform())
    for row, (context, params) in enumerate(requests):
        table.token_table[row, : len(context)] = torch.tensor(context, dtype=torch.int32)
        table.num_prompt_tokens[row] = len(context) // 2
        for state in table._states:
            state.add(row, NewRequest(row, context, len(context) // 2, [[1]], params))
    return sampler


def processed(requests: list[tuple[list[int], SamplingParams]], logits: torch.Tensor) -> np.ndarray:
    """The distributions from which the rows' tokens are drawn."""
    sampler = sampler_of(requests, logits.shape[1])
    batch, logits = make_batch(list(range(len(requests))), [len(context) for context, _ in requests]), logits.clone()
    for processor in sampler.processors:
        if processor.needed(batch):
            processor.apply(logits, batch)
    for row, (_, params) in enumerate(requests):
        if params.temperature == 0:
            logits[row][torch.arange(logits.shape[1]) != logits[row].argmax()] = -INF
    return torch.softmax(logits.double(), 1).numpy()


def expected(context: list[int], params: SamplingParams, logits: torch.Tensor) -> np.ndarray:
    state = torch.tensor([arithmetic.seed_state(params.seed ^ _XTC_STREAM)])
    uniform = float(arithmetic.uniform(state, torch.tensor([len(context)])))
    found = Chain(params, context, uniform).distribution(logits.tolist())
    return found if params.temperature else (np.arange(len(found)) == found.argmax()).astype(float)


SHARES = st.floats(0.01, 0.99)
CHAINS = st.builds(
    SamplerChain,
    order=st.one_of(
        st.just(SAMPLERS), st.permutations(SAMPLERS).flatmap(lambda p: st.integers(0, 9).map(lambda n: tuple(p[:n])))
    ),
    typical_p=st.just(1.0) | SHARES,
    top_n_sigma=st.just(0.0) | st.floats(0.3, 3),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.floats(0.005, 0.6),
    dynatemp_range=st.just(0.0) | st.floats(0.05, 1.5),
    dynatemp_exponent=st.floats(0.3, 3),
    min_keep=st.integers(0, 5),
    mirostat=st.sampled_from([0, 0, 0, 1, 2]),
    mirostat_tau=st.floats(1, 6),
    dry=st.none()
    | st.builds(Dry, st.floats(0.1, 2), st.floats(1.1, 2), st.integers(0, 4), st.sampled_from([-1, 0, 8, 64])),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.2, 2),
    top_k=st.integers(0, 30),
    top_p=st.just(1.0) | SHARES,
    min_p=st.just(0.0) | st.floats(0.01, 0.5),
    seed=st.integers(0, 1 << 40),
    repetition_penalty=st.just(1.0) | st.floats(0.8, 1.5),
    frequency_penalty=st.just(0.0) | st.floats(-0.5, 0.5),
    presence_penalty=st.just(0.0) | st.floats(-0.5, 0.5),
    repeat_last_n=st.sampled_from([-1, 1, 5, 64]),
    chain=CHAINS,
)
CONTEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(requests=st.lists(st.tuples(CONTEXT, PARAMS), min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
def test_distributions_are_those_of_the_definitions(requests, seed):
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    found = processed(requests, logits)
    for row, (context, params) in enumerate(requests):
        want = expected(context, params, logits[row])
        # a token at the very edge of a filter may fall to either side, because llama.cpp and we round differently
        if ((found[row] > 0) != (want > 0)).any():
            edges = [expected(context, _nudged(params, factor), logits[row]) for factor in (1 - 1e-5, 1 + 1e-5)]
            assert any(np.allclose(found[row], edge, atol=1e-4) for edge in edges), (params, found[row], want)
        else:
            np.testing.assert_allclose(found[row], want, atol=1e-4)


def _nudged(params: SamplingParams, factor: float) -> SamplingParams:
    chain = msgspec.structs.replace(
        params.chain,
        typical_p=min(params.chain.typical_p * factor, 1.0),
        top_n_sigma=params.chain.top_n_sigma * factor,
        xtc_threshold=params.chain.xtc_threshold * factor,
    )
    return msgspec.structs.replace(
        params, chain=chain, top_p=min(params.top_p * factor, 1.0), min_p=params.min_p * factor
    )


CASES = {
    "typical_p": ({"temperature": 0.9}, {"typical_p": 0.6}),
    "top_n_sigma": ({"temperature": 1.3}, {"top_n_sigma": 1.0}),
    "xtc": ({"temperature": 1.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.05}),
    "xtc half the time": ({"temperature": 1.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "dynamic temperature": ({"temperature": 0.9}, {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5}),
    "dry": ({"temperature": 1.0}, {"dry": Dry(0.8)}),
    "the order": (
        {"temperature": 2.0, "top_p": 0.7, "top_k": 12, "min_p": 0.02},
        {"order": ("temperature", "min_p", "top_k", "top_p")},
    ),
    "all": (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
        {"typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.3, "dynatemp_range": 0.2, "dry": Dry(1.0)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_follow_the_distribution(case):
    """Chi-square of 4,000 draws."""
    given_, chain = CASES[case]
    context, num = [1, 2, 3, 1, 2, 3, 1, 2], 4000
    params = SamplingParams(**given_, repeat_last_n=64, chain=SamplerChain(**{"order": SAMPLERS} | chain), seed=7)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2
    requests = [(context, msgspec.structs.replace(params, seed=seed)) for seed in range(num)]
    sampler = sampler_of(requests)
    batch = make_batch(list(range(num)), [len(context)] * num)
    drawn = sampler.sample(logits.expand(num, -1).clone(), batch).token_ids
    probability = params.chain.xtc_probability
    with_xtc, without = (Chain(params, context, u).distribution(logits.tolist()) for u in (0.0, 0.9999))
    want = probability * with_xtc + (1 - probability) * without
    counts = np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)
    assert not counts[want == 0].any()
    real = want > 5 / num  # the usual rule for a chi-square
    rest_want, rest = want[~real].sum() * num, counts[~real].sum()
    statistic = ((counts[real] - num * want[real]) ** 2 / (num * want[real])).sum()
    statistic += (rest - rest_want) ** 2 / rest_want if rest_want else 0.0
    degrees = int(real.sum()) - (0 if rest_want else 1)
    assert statistic < degrees + 4 * math.sqrt(2 * max(degrees, 1)) + 4, (statistic, degrees)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_its_definition_over_many_tokens(version):
    params = SamplingParams(
        temperature=1.2, seed=5, chain=SamplerChain(SAMPLERS, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.3)
    )
    sampler, reference = sampler_of([([1], params)]), Chain(params)
    generator, surprises = torch.Generator().manual_seed(3), []
    for position in range(1, 200):
        logits = torch.randn(VOCAB_SIZE, generator=generator) * 3
        want = reference.distribution(logits.tolist())
        (token,) = sampler.sample(logits[None].clone(), make_batch([0], [position])).token_ids.tolist()
        assert want[token] > 0
        surprises.append(-math.log2(want[token]))
        reference.observe(want, token)
        assert abs(float(sampler.chains._mu[0]) - reference.mu) < 1e-3
    assert len({round(s, 3) for s in surprises}) > 20


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    context=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    dry=st.builds(
        Dry,
        st.floats(0.1, 3),
        st.floats(1.0, 3),
        st.integers(0, 6),
        st.sampled_from([-1, 1, 7, 100]),
        st.sets(st.integers(0, 4), max_size=2).map(tuple),
        st.lists(
            st.tuples(
                st.sets(st.integers(0, 4), min_size=1, max_size=2).map(tuple),
                st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
    ),
)
def test_dry_equals_plain_loops(context, dry):
    assume(not 1.0 < dry.base <= 1.000001)
    breakers = dry_module.read_breakers(dry, 8, torch.device("cpu"))
    recent = torch.tensor(context[-dry.last_n :] if dry.last_n > 0 else context).flip(0)
    found = dry_module.penalties(recent, dry, breakers, 8)
    want = dry_penalties(context, dry)
    np.testing.assert_allclose(found.numpy(), [want.get(token, 0.0) for token in range(8)], rtol=1e-5)


def test_long_contexts_take_little_memory():
    recent = torch.arange(100_000) % 7
    found = dry_module.penalties(recent, Dry(1.0, 1.01), dry_module.read_breakers(Dry(1.0), 8, recent.device), 8)
    assert torch.isfinite(found).all() and (found > 1e30).sum() == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(CONTEXT, PARAMS), min_size=2, max_size=5), seed=st.integers(0, 1 << 30))
def test_alone_and_in_a_crowd(requests, seed):
    """The same bits whatever else is in the batch."""
    logits = torch.randn(len(requests), 1000, generator=torch.Generator().manual_seed(seed)) * 3
    together = processed(requests, logits)
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(processed([request], logits[row : row + 1])[0], together[row])


def test_rows_without_a_token_stay_without():
    params = SamplingParams(chain=SamplerChain(SAMPLERS, typical_p=0.5, top_n_sigma=1.0, xtc_probability=1.0))
    logits = torch.stack(
        [torch.full((VOCAB_SIZE,), -INF), torch.full((VOCAB_SIZE,), math.nan), torch.zeros(VOCAB_SIZE)]
    )
    logits[0, 3] = -INF
    sampler = sampler_of([([1], params)] * 3)
    token_ids = sampler.sample(logits, make_batch([0, 1, 2], [1, 1, 1])).token_ids.tolist()
    assert token_ids[:2] == [-1, -1] and token_ids[2] >= 0


def test_masks_hold():
    """Tokens that a mask excludes stay excluded, and one that is left is taken."""
    chain = SamplerChain(SAMPLERS, typical_p=0.5, top_n_sigma=0.5, xtc_probability=1.0, dry=Dry(1.0, allowed_length=0))
    sampler = sampler_of([([5, 5, 5], SamplingParams(chain=chain, allowed_token_ids=[5], seed=i)) for i in range(20)])
    logits = torch.randn(20, VOCAB_SIZE)
    assert sampler.sample(logits, make_batch(list(range(20)), [3] * 20)).token_ids.tolist() == [5] * 20


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="dry_sequence_breakers"):
        sampler_of([([1], SamplingParams(chain=SamplerChain(SAMPLERS, dry=Dry(1.0, breakers=(VOCAB_SIZE,)))))])
