"""The budget of thinking against its definition, written as a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import NewRequest, SamplingParams, ThinkingBudget
from quire.worker.platforms.cpu import CpuPlatform
from quire.worker.sampling.thinking import LATEST_BEGIN, EndOfThinking
from tests.worker.test_sampler import make_batch

VOCAB_SIZE, MAX_LEN = 12, 64
BEGIN, END, OTHER = 1, 2, 3


def budget(size: int, opened: bool = True, begin=(BEGIN,), end=(END,), forced=(END,)) -> ThinkingBudget:
    return ThinkingBudget(size, opened, begin, end, forced)


def find(tokens: list[int], sequence: tuple[int, ...], start: int = 0) -> int:
    """Index of the first occurrence from `start` on, or -1."""
    for i in range(start, len(tokens) - len(sequence) + 1):
        if tuple(tokens[i : i + len(sequence)]) == sequence:
            return i
    return -1


def expected(outputs: list[int], thinking: ThinkingBudget) -> int | None:
    """The token that must follow `outputs`; None: any."""
    start = 0
    if not thinking.opened:
        begin = find(outputs[: LATEST_BEGIN + len(thinking.begin)], thinking.begin)
        if begin < 0:
            return None
        start = begin + len(thinking.begin)
    number = len(outputs) - start - thinking.budget
    if not 0 <= number < len(thinking.forced) or find(outputs[: start + thinking.budget], thinking.end) >= 0:
        return None
    return thinking.forced[number]


def apply(requests: list[tuple[list[int], list[int], ThinkingBudget | None]]) -> list[int | None]:
    """Per (prompt, outputs, thinking) the token that is forced next."""
    table = RequestTable(len(requests), MAX_LEN, 16, VOCAB_SIZE, CpuPlatform())
    processor = EndOfThinking(table, CpuPlatform())
    for row, (prompt, outputs, thinking) in enumerate(requests):
        tokens = prompt + outputs
        table.num_prompt_tokens[row] = len(prompt)
        table.token_table[row] = END  # left by another request
        table.token_table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        processor.add(row, NewRequest(row, tokens, len(prompt), [[1]], SamplingParams(thinking=thinking)))
    batch = make_batch(list(range(len(requests))), [len(prompt + outputs) for prompt, outputs, _ in requests])
    logits = before = torch.randn(len(requests), VOCAB_SIZE)
    if processor.needed(batch):
        logits = before.clone()
        processor.apply(logits, batch)
    forced = []
    for row, one in zip(logits, before):
        allowed = row.isfinite().nonzero().flatten().tolist()
        assert torch.equal(row, one) or len(allowed) == 1
        forced.append(None if torch.equal(row, one) else allowed[0])
    return forced


tokens = st.lists(st.sampled_from([BEGIN, END, OTHER, 4]), max_size=24)
markers = st.sampled_from([(BEGIN,), (BEGIN, 4), (4, 4)])
thinkings = st.builds(
    ThinkingBudget, st.integers(0, 12), st.booleans(), markers, st.sampled_from([(END,), (END, 4)]),
    st.sampled_from([(END,), (5, END, 6), (END, 4)]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(tokens.filter(bool), tokens, st.none() | thinkings), min_size=1, max_size=4))
def test_the_definition(requests):
    assert apply(requests) == [None if thinking is None else expected(out, thinking) for _, out, thinking in requests]


@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_end_at_the_budget_and_only_then(opened):
    thinking = budget(3, opened, forced=(7, END, 8))
    outputs: list[int] = [] if opened else [OTHER, BEGIN]
    num_before = len(outputs)
    for _ in range(8):
        (forced,) = apply([([9], outputs, thinking)])
        outputs.append(OTHER if forced is None else forced)
    assert outputs[num_before:] == [OTHER] * 3 + [7, END, 8, OTHER, OTHER]


def test_no_budget_at_all():
    assert apply([([9], [], budget(0)), ([9], [], budget(0, False)), ([9], [BEGIN], budget(0, False))]) == [
        END,
        None,
        END,
    ]


def test_thoughts_that_have_ended_are_left_alone():
    assert apply([([9], [OTHER, END, 5, 5], budget(4))]) == [None]


def test_a_budget_beyond_the_context():
    assert apply([([9], [OTHER] * 20, budget(2**62))]) == [None]
