"""Sequences that must not occur again, against plain loops and transformers' processor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NoRepeatNgram, SamplingParams
from quire.worker.sampling import ngrams
from quire.worker.sampling.ngrams import RepeatedNgrams
from quire.worker.sampling.processors import LogitsProcessor
from tests.worker.sampling.test_logits_processors import VOCAB_SIZE, excluded
from tests.worker.sampling.test_logits_processors import Setup as Rows
from tests.worker.sampling.test_sampler import make_batch


class Setup(Rows):
    """Rows of which each may have a `NoRepeatNgram`."""

    def __init__(self, requests: list[tuple[list[int], list[int], NoRepeatNgram | None]]):
        super().__init__([(*tokens, SamplingParams(no_repeat_ngram=ngram)) for *tokens, ngram in requests])

    def make_processors(self) -> list[LogitsProcessor]:
        return [RepeatedNgrams(self.table, CpuPlatform())]


def expected(prompt: list[int], outputs: list[int], ngram: NoRepeatNgram | None) -> set[int]:
    """The loop of vLLM's and SGLang's processors for DeepSeek-OCR, with and without the prompt."""
    if ngram is None:
        return set()
    tokens, size = [*prompt, *outputs] if ngram.reads_prompt else outputs, ngram.size
    banned = set()
    for i in range(max(0, len(tokens) - ngram.window) if ngram.window else 0, len(tokens) - size + 1):
        if tokens[i : i + size - 1] == tokens[len(tokens) - size + 1 :]:
            banned.add(tokens[i + size - 1])
    return banned - set(ngram.exempt)


FEW = st.integers(0, 2)  # so that sequences are often repeated
TOKENS = st.one_of(st.lists(FEW, max_size=30), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
NGRAMS = st.builds(
    NoRepeatNgram,
    size=st.integers(1, 8),
    window=st.integers(0, 40),
    exempt=st.lists(FEW, max_size=2).map(tuple),
    reads_prompt=st.booleans(),
)
REQUESTS = st.lists(
    st.tuples(TOKENS.filter(bool), TOKENS, st.one_of(NGRAMS, st.just(NoRepeatNgram(2, 9)), st.none())),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(requests=REQUESTS, chunk=st.sampled_from([1, 64, 1 << 24]))
def test_equals_plain_loops(requests, chunk):
    setup = Setup(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "_CHUNK_ELEMENTS", chunk)
        logits = setup.process(torch.arange(len(requests) * VOCAB_SIZE).view(len(requests), -1).float())
    for row, request in enumerate(requests):
        assert excluded(logits[row]) == expected(*request)
        kept = sorted(set(range(VOCAB_SIZE)) - expected(*request))
        assert logits[row][kept].tolist() == [row * VOCAB_SIZE + token for token in kept]


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(FEW, min_size=1, max_size=30), size=st.integers(1, 6), window=st.integers(0, 30))
def test_equals_transformers(tokens, size, window):
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    ids = torch.tensor([tokens[-window:]])
    theirs = NoRepeatNGramLogitsProcessor(size)(ids, torch.zeros(1, VOCAB_SIZE))[0]
    half = len(tokens) // 2
    logits = Setup([(tokens[:half], tokens[half:], NoRepeatNgram(size, window))]).process(torch.zeros(1, VOCAB_SIZE))
    assert excluded(logits[0]) == excluded(theirs)


def test_rows_without_it_cost_nothing():
    setup = Setup([([1, 2], [3], None), ([1, 1, 1], [], NoRepeatNgram(2)), ([1, 1], [1], NoRepeatNgram(3, 2))])
    (processor,) = setup.processors
    assert not processor.needed(make_batch([0], [3]))
    assert processor.needed(make_batch([0, 1], [3, 3]))
    assert not processor.needed(make_batch([2], [3])), "the window is shorter than a sequence"


def test_a_step_does_not_grow_with_the_rows():
    calls = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[-1] += 1
            return func(*args, **(kwargs or {}))

    for num in (1, 20):
        setup = Setup([([1, 2, 3], [1, 2, 3], NoRepeatNgram(3, 6, (5,)))] * num)
        calls.append(0)
        with Counter():
            setup.process(torch.zeros(num, VOCAB_SIZE))
    assert calls[1] <= calls[0]


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="whitelist_token_ids"):
        Setup([([1], [], NoRepeatNgram(3, 6, (VOCAB_SIZE,)))])
