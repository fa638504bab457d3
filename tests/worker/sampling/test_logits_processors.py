"""Each processor against its definition, written as plain loops over tokens; the repetition penalty also against
transformers.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NewRequest, SamplingParams
from quire.worker.sampling import processors as module
from quire.worker.sampling.processors import LogitsProcessor, logits_processors
from tests.worker.sampling.test_sampler import make_batch

VOCAB_SIZE = 20
INF = float("inf")


class Setup:
    """Rows with contexts; `process` runs the processors that their parameters need."""

    def __init__(self, requests: list[tuple[list[int], list[int], SamplingParams]]):
        self.table = RequestTable(len(requests) + 1, 64, 16, VOCAB_SIZE, CpuPlatform())
        self.processors = self.make_processors()
        self.lengths = []
        for row, (prompt, outputs, sampling) in enumerate(requests):
            self.table.num_prompt_tokens[row] = len(prompt)
            self.table.token_table[row] = 19  # left by another request
            self.table.token_table[row, : len(prompt + outputs)] = torch.tensor(prompt + outputs, dtype=torch.int32)
            self.lengths.append(len(prompt + outputs))
            for processor in self.processors:
                processor.add(row, NewRequest(row, prompt + outputs, len(prompt), [[1]], sampling))

    def make_processors(self) -> list[LogitsProcessor]:
        return logits_processors(self.table, CpuPlatform())

    def process(self, logits: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        rows = list(range(len(self.lengths))) if rows is None else rows
        batch, logits = make_batch(rows, [self.lengths[row] for row in rows]), logits.clone()
        for processor in self.processors:
            if processor.needed(batch):
                processor.apply(logits, batch)
        return logits


def one(
    sampling: SamplingParams, prompt: list[int] = (1,), outputs: list[int] = (), logits: torch.Tensor | None = None
) -> torch.Tensor:
    logits = torch.zeros(VOCAB_SIZE) if logits is None else logits
    return Setup([(list(prompt), list(outputs), sampling)]).process(logits[None])[0]


def excluded(logits: torch.Tensor) -> set[int]:
    return set((logits == -INF).nonzero().flatten().tolist())


def test_nothing_is_needed_by_default():
    setup = Setup([([1, 2], [3], SamplingParams())])
    assert not any(processor.needed(make_batch([0], [3])) for processor in setup.processors)


def test_rows_that_are_not_in_the_batch_cost_nothing():
    setup = Setup(
        [([1], [], SamplingParams(logit_bias={3: 1.0}, min_tokens=5, eos_token_ids=[2])), ([1], [], SamplingParams())]
    )
    assert not any(processor.needed(make_batch([1], [1])) for processor in setup.processors)
    assert setup.process(torch.zeros(1, VOCAB_SIZE), [1]).count_nonzero() == 0


def test_logit_bias():
    logits = one(SamplingParams(logit_bias={3: 2.5, 7: -100.0}))
    assert logits[3] == 2.5 and logits[7] == -100 and logits.count_nonzero() == 2


def test_allowed_tokens():
    assert excluded(one(SamplingParams(allowed_token_ids=[4, 9]))) == set(range(VOCAB_SIZE)) - {4, 9}


def test_bias_does_not_bring_back_what_is_excluded():
    assert 3 in excluded(
        one(SamplingParams(allowed_token_ids=[4], logit_bias={3: 100.0}, repetition_penalty=2.0), prompt=[3])
    )


@pytest.mark.parametrize("num_outputs, banned", [(0, {2, 5, 6}), (2, {2, 5, 6}), (3, set()), (4, set())])
def test_min_tokens(num_outputs, banned):
    sampling = SamplingParams(min_tokens=3, stop_token_ids=[5, 6], eos_token_ids=[2], ignore_eos=True)
    assert excluded(one(sampling, prompt=[1, 1], outputs=[8] * num_outputs)) == banned


def test_min_tokens_is_forgotten_once_reached():
    setup = Setup([([1], [8, 8, 8], SamplingParams(min_tokens=3, eos_token_ids=[2]))])
    setup.process(torch.zeros(1, VOCAB_SIZE))
    assert not any(processor.rows for processor in setup.processors)


WORDS = [[4], [1, 2], [1, 3, 5], [9, 9, 9, 9, 6]]


@pytest.mark.parametrize(
    "prompt, outputs, banned",
    [
        ([7], [], {4}),
        ([1], [], {4, 2}),  # the prompt counts
        ([7, 1], [3], {4, 5}),  # across prompt and output
        ([7], [1, 3, 8], {4}),
        ([9, 9], [9, 9], {4, 6}),
        ([9, 9, 9], [], {4}),  # longer than the context
        ([3], [], {4}),
    ],
)
def test_bad_words(prompt, outputs, banned):
    assert excluded(one(SamplingParams(bad_words_ids=WORDS), prompt, outputs)) == banned


def test_bad_words_that_share_their_last_token():
    assert excluded(one(SamplingParams(bad_words_ids=[[1, 2], [3, 2], [5, 2]]), [3], [])) == {2}


def _penalized(logits, prompt, outputs, sampling):
    result, counts = logits.tolist(), Counter(outputs)
    for token in set(prompt) | set(outputs):
        result[token] = (
            result[token] / sampling.repetition_penalty
            if result[token] > 0
            else result[token] * sampling.repetition_penalty
        )
    for token, count in counts.items():
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return torch.tensor(result)


_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
_request = st.tuples(_tokens.filter(len), _tokens, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(_request, min_size=1, max_size=5), st.integers(0, 1000))
def test_penalties(requests, seed):
    params = [
        SamplingParams(repetition_penalty=r, frequency_penalty=f, presence_penalty=p) for _, _, r, f, p in requests
    ]
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    got = Setup([(prompt, outputs, sampling) for (prompt, outputs, *_), sampling in zip(requests, params)]).process(
        logits
    )
    for i, (prompt, outputs, *_) in enumerate(requests):
        torch.testing.assert_close(got[i], _penalized(logits[i], prompt, outputs, params[i]), atol=1e-5, rtol=1e-5)


def test_repetition_penalty_is_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt, outputs = torch.randn(VOCAB_SIZE), [1, 5, 5], [7, 1]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + outputs]), logits[None].clone())[0]
    torch.testing.assert_close(one(SamplingParams(repetition_penalty=1.7), prompt, outputs, logits), want)


@pytest.mark.parametrize(
    "name, params",
    [
        ("logit_bias", SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=[-1])),
        ("bad_words", SamplingParams(bad_words_ids=[[3, 99]])),
        ("stop_token_ids", SamplingParams(min_tokens=1, stop_token_ids=[99])),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(name, params):
    with pytest.raises(ValueError, match=f"{name} contains token id"):
        one(params)


def _defined(logits: torch.Tensor, prompt: list[int], outputs: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Apply the parameters to one row by definition, token by token."""
    context, result = prompt + outputs, logits.clone()
    for token in range(VOCAB_SIZE):
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            result[token] = -INF
        for word in sampling.bad_words_ids or []:
            if (
                word
                and word[-1] == token
                and len(word) <= len(context) + 1
                and context[len(context) - len(word) + 1 :] == word[:-1]
            ):
                result[token] = -INF
        if len(outputs) < sampling.min_tokens and token in [*sampling.stop_token_ids, *sampling.eos_token_ids]:
            result[token] = -INF
        result[token] += (sampling.logit_bias or {}).get(token, 0.0)
    return _penalized(result, prompt, outputs, sampling)


_id = st.integers(0, 4)  # a small vocabulary, so that words match and end in the same tokens
_words = st.lists(st.lists(_id, max_size=5), max_size=6)
_row = st.tuples(
    st.lists(_id, min_size=1, max_size=6),
    st.lists(_id, max_size=4),
    st.builds(
        SamplingParams,
        allowed_token_ids=st.none() | st.lists(_id, min_size=1, max_size=6),
        bad_words_ids=st.none() | _words,
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(_id, max_size=3),
        eos_token_ids=st.lists(st.integers(5, 7), max_size=2),
        logit_bias=st.none() | st.dictionaries(_id, st.floats(-5, 5, width=32)),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
    ),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.lists(_row, min_size=1, max_size=6), st.integers(0, 1000), st.data())
def test_batches_are_their_rows_by_definition(requests, seed, data):
    """All processors at once, over batches of changing rows that are reassigned to other requests in between."""
    setup = Setup(requests)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        rows = data.draw(st.lists(st.integers(0, len(requests) - 1), min_size=1, unique=True))
        logits = torch.randn(len(rows), VOCAB_SIZE + 3, generator=generator)[
            :, :VOCAB_SIZE
        ]  # not contiguous, as with a padded vocabulary
        got = setup.process(logits, rows)
        for i, row in enumerate(rows):
            prompt, outputs, sampling = requests[row]
            torch.testing.assert_close(got[i], _defined(logits[i], prompt, outputs, sampling), atol=1e-5, rtol=1e-5)
        changed = data.draw(st.integers(0, len(requests) - 1))
        prompt, outputs, _ = requests[changed]
        sampling = data.draw(_row)[2]
        requests[changed] = prompt, outputs, sampling
        for processor in setup.processors:
            processor.remove(changed)
            processor.add(changed, NewRequest(changed, prompt + outputs, len(prompt), [[1]], sampling))


def test_bad_words_take_memory_for_their_tokens_alone():
    """One long sequence does not lengthen the others: 300 words and one of 20,000 tokens once took tables of 6,000,000
    entries.
    """
    words = [[1, 2]] * 300 + [[3] * 20_000]
    processor = next(
        p
        for p in logits_processors(RequestTable(1, 64, 16, VOCAB_SIZE, CpuPlatform()), CpuPlatform())
        if isinstance(p, module.BadWords)
    )
    tracemalloc.start()
    try:
        processor.add(0, NewRequest(0, [1], 1, [[1]], SamplingParams(bad_words_ids=words)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * sum(map(len, words))
    assert excluded(one(SamplingParams(bad_words_ids=words), [1])) == {2}


class Launches(TorchDispatchMode):
    """Counts the operations launched on the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not str(func).startswith(("aten.view", "aten.slice", "aten.select", "aten.t."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(allowed_token_ids=[1, 2]),
        SamplingParams(bad_words_ids=WORDS),
        SamplingParams(min_tokens=9, eos_token_ids=[2]),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(repetition_penalty=1.1),
    ],
)
def test_a_step_launches_no_more_for_many_rows(sampling):
    counts = []
    for num_rows in (1, 16):
        setup = Setup([([1, 3], [1], sampling)] * num_rows)
        setup.process(torch.zeros(num_rows, VOCAB_SIZE))  # composes
        with Launches() as launches:
            setup.process(torch.zeros(num_rows, VOCAB_SIZE))
        counts.append(launches.count)
    assert counts[1] <= counts[0] + 2, counts


def test_penalties_copy_a_bounded_number_of_rows(monkeypatch):
    """In chunks of rows the result is the same."""
    requests = [
        ([1, 2, i], [3, i], SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.25))
        for i in range(7)
    ]
    logits = torch.randn(7, VOCAB_SIZE)
    want = Setup(requests).process(logits)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2 * VOCAB_SIZE)
    sizes = []
    apply = module.Penalties._penalize
    monkeypatch.setattr(
        module.Penalties,
        "_penalize",
        lambda self, logits, using, batch: (sizes.append(len(using)), apply(self, logits, using, batch)),
    )
    assert torch.equal(Setup(requests).process(logits), want) and sizes == [2, 2, 2, 1]
