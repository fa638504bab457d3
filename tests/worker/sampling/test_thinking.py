"""The budget of thinking against its definition, written as a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NewRequest, SamplingParams, ThinkingBudget
from quire.worker.sampling.thinking import EndOfThinking
from tests.worker.sampling.test_sampler import make_batch

VOCAB_SIZE, MAX_LEN = 12, 64
BEGIN, END, OTHER = 1, 2, 3


def budget(size: int, opened: bool = True, begin=(BEGIN,), end=(END,), forced=(END,)) -> ThinkingBudget:
    return ThinkingBudget(size, opened, begin, end, forced)


def ends_with(tokens: list[int], marker: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(marker) :]) == marker


def expected(outputs: list[int], thinking: ThinkingBudget) -> int | None:
    """The token that must follow `outputs`, in which every forced token was forced; None: any."""
    start = 0 if thinking.opened else None  # of the block that is open
    searched = 0  # markers may not begin before this output
    for count in range(len(outputs) + 1):
        if start is not None and count >= start + thinking.budget:
            if count == len(outputs):
                return thinking.forced[count - start - thinking.budget]
            if count - start - thinking.budget == len(thinking.forced) - 1:
                start, searched = None, start + thinking.budget
        elif (
            start is not None and tuple(outputs[max(start, searched) : count + 1][-len(thinking.end) :]) == thinking.end
        ):
            start, searched = None, count + 1
        if start is None and tuple(outputs[searched : count + 1][-len(thinking.begin) :]) == thinking.begin:
            start = searched = count + 1
    return None


def written(script: list[int], thinking: ThinkingBudget) -> list[int]:
    """The outputs of a model that wants to write `script`."""
    outputs: list[int] = []
    for token in script:
        forced = expected(outputs, thinking)
        outputs.append(token if forced is None else forced)
    return outputs


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


scripts = st.lists(st.sampled_from([BEGIN, END, OTHER, 4]), max_size=24)
thinkings = st.builds(
    ThinkingBudget, st.integers(0, 12), st.booleans(),
    st.sampled_from([(BEGIN,), (BEGIN, OTHER), (OTHER, BEGIN, OTHER)]),
    st.sampled_from([(END,), (END, 4)]), st.sampled_from([(END, 4), (5, END, 4), (5, END, 4, 6, 7)]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(scripts.filter(bool), scripts, thinkings), min_size=1, max_size=4))
def test_the_definition(requests):
    requests = [(prompt, written(script, thinking), thinking) for prompt, script, thinking in requests]
    assert apply(requests) == [expected(outputs, thinking) for _, outputs, thinking in requests]


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


def test_every_block_has_a_budget():
    thinking = budget(2, opened=False, forced=(5, END))
    after_content = [BEGIN, OTHER, OTHER, 5, END, OTHER, OTHER, OTHER, OTHER, OTHER, BEGIN, OTHER, OTHER]
    assert apply([([9], after_content, thinking), ([9], [*after_content, 5], thinking)]) == [5, END]
    begun_twice = [BEGIN, BEGIN, OTHER, 5]  # the second marker is a thought
    assert apply([([9], begun_twice, thinking), ([9], [*begun_twice, END], thinking)]) == [END, None]


def test_rows_without_a_budget_are_left_alone():
    assert apply([([9], [OTHER, OTHER], None), ([9], [OTHER, OTHER], budget(2))]) == [None, END]


def test_a_budget_beyond_the_context():
    assert apply([([9], [OTHER] * 20, budget(2**62))]) == [None]
