"""Each processor against its definition, written as plain loops over tokens; the repetition penalty also against transformers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.test_sampler import make_batch
from worker.logits_processors import logits_processors
from worker.messages import NewRequest, SamplingParams
from worker.platform import CpuPlatform
from worker.request_table import RequestTable

VOCAB_SIZE = 20
INF = float("inf")


class Setup:
    """Rows with contexts; `process` runs what their parameters need."""

    def __init__(self, requests: list[tuple[list[int], list[int], SamplingParams]]):
        self.table = RequestTable(len(requests) + 1, 64, 16, VOCAB_SIZE, torch.device("cpu"))
        self.processors = logits_processors(self.table, CpuPlatform())
        self.lengths = []
        for row, (prompt, outputs, sampling) in enumerate(requests):
            self.table.num_prompt_tokens[row] = len(prompt)
            self.table.token_table[row] = 19  # left from somebody else
            self.table.token_table[row, : len(prompt + outputs)] = torch.tensor(prompt + outputs, dtype=torch.int32)
            self.lengths.append(len(prompt + outputs))
            for processor in self.processors:
                processor.add(row, NewRequest(row, prompt + outputs, len(prompt), [1], sampling))

    def process(self, logits: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        rows = list(range(len(self.lengths))) if rows is None else rows
        batch, logits = make_batch(rows, [self.lengths[row] for row in rows]), logits.clone()
        for processor in self.processors:
            if processor.needed(batch):
                processor.apply(logits, batch)
        return logits


def one(sampling: SamplingParams, prompt: list[int] = (1,), outputs: list[int] = (), logits: torch.Tensor | None = None) -> torch.Tensor:
    logits = torch.zeros(VOCAB_SIZE) if logits is None else logits
    return Setup([(list(prompt), list(outputs), sampling)]).process(logits[None])[0]


def excluded(logits: torch.Tensor) -> set[int]:
    return set((logits == -INF).nonzero().flatten().tolist())


def test_nothing_is_needed_by_default():
    setup = Setup([([1, 2], [3], SamplingParams())])
    assert not any(processor.needed(make_batch([0], [3])) for processor in setup.processors)


def test_rows_that_are_not_in_the_batch_cost_nothing():
    setup = Setup([([1], [], SamplingParams(logit_bias={3: 1.0}, min_tokens=5, eos_token_ids=[2])), ([1], [], SamplingParams())])
    assert not any(processor.needed(make_batch([1], [1])) for processor in setup.processors)
    assert setup.process(torch.zeros(1, VOCAB_SIZE), [1]).count_nonzero() == 0


def test_logit_bias():
    logits = one(SamplingParams(logit_bias={3: 2.5, 7: -100.0}))
    assert logits[3] == 2.5 and logits[7] == -100 and logits.count_nonzero() == 2


def test_allowed_tokens():
    assert excluded(one(SamplingParams(allowed_token_ids=[4, 9]))) == set(range(VOCAB_SIZE)) - {4, 9}


def test_bias_does_not_bring_back_what_is_excluded():
    assert 3 in excluded(one(SamplingParams(allowed_token_ids=[4], logit_bias={3: 100.0}, repetition_penalty=2.0), prompt=[3]))


@pytest.mark.parametrize("num_outputs, banned", [(0, {2, 5, 6}), (2, {2, 5, 6}), (3, set()), (4, set())])
def test_min_tokens(num_outputs, banned):
    sampling = SamplingParams(min_tokens=3, stop_token_ids=[5, 6], eos_token_ids=[2], ignore_eos=True)
    assert excluded(one(sampling, prompt=[1, 1], outputs=[8] * num_outputs)) == banned


def test_min_tokens_is_forgotten_once_reached():
    setup = Setup([([1], [8, 8, 8], SamplingParams(min_tokens=3, eos_token_ids=[2]))])
    setup.process(torch.zeros(1, VOCAB_SIZE))
    assert not any(processor.rows for processor in setup.processors)


WORDS = [[4], [1, 2], [1, 3, 5], [9, 9, 9, 9, 6]]


@pytest.mark.parametrize("prompt, outputs, banned", [
    ([7], [], {4}),
    ([1], [], {4, 2}),  # the prompt counts
    ([7, 1], [3], {4, 5}),  # across prompt and output
    ([7], [1, 3, 8], {4}),
    ([9, 9], [9, 9], {4, 6}),
    ([9, 9, 9], [], {4}),  # longer than the context
    ([3], [], {4}),
])
def test_bad_words(prompt, outputs, banned):
    assert excluded(one(SamplingParams(bad_words_ids=WORDS), prompt, outputs)) == banned


def test_bad_words_that_share_their_last_token():
    assert excluded(one(SamplingParams(bad_words_ids=[[1, 2], [3, 2], [5, 2]]), [3], [])) == {2}


def _penalized(logits, prompt, outputs, sampling):
    result, counts = logits.tolist(), Counter(outputs)
    for token in set(prompt) | set(outputs):
        result[token] = result[token] / sampling.repetition_penalty if result[token] > 0 else result[token] * sampling.repetition_penalty
    for token, count in counts.items():
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return torch.tensor(result)


_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
_request = st.tuples(_tokens.filter(len), _tokens, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(_request, min_size=1, max_size=5), st.integers(0, 1000))
def test_penalties(requests, seed):
    params = [SamplingParams(repetition_penalty=r, frequency_penalty=f, presence_penalty=p) for _, _, r, f, p in requests]
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    got = Setup([(prompt, outputs, sampling) for (prompt, outputs, *_), sampling in zip(requests, params)]).process(logits)
    for i, (prompt, outputs, *_) in enumerate(requests):
        torch.testing.assert_close(got[i], _penalized(logits[i], prompt, outputs, params[i]), atol=1e-5, rtol=1e-5)


def test_repetition_penalty_is_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt, outputs = torch.randn(VOCAB_SIZE), [1, 5, 5], [7, 1]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + outputs]), logits[None].clone())[0]
    torch.testing.assert_close(one(SamplingParams(repetition_penalty=1.7), prompt, outputs, logits), want)


@pytest.mark.parametrize("name, params", [
    ("logit_bias", SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    ("allowed_token_ids", SamplingParams(allowed_token_ids=[-1])),
    ("bad_words", SamplingParams(bad_words_ids=[[3, 99]])),
    ("stop_token_ids", SamplingParams(min_tokens=1, stop_token_ids=[99])),
])
def test_ids_outside_the_vocabulary_are_refused(name, params):
    with pytest.raises(ValueError, match=f"{name} holds token id"):
        one(params)
