from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.batch.request_table import RequestTable, check_token_ids
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.messages import NewRequest, SamplingParams, StepInput

CPU = CpuPlatform()


class Recorder:
    """A row state that rejects requests with `seed` 13."""

    def __init__(self):
        self.calls = []

    def add(self, row, new):
        self.calls.append(("add", row))
        if new.sampling.seed == 13:
            raise ValueError("unlucky")

    def remove(self, row):
        self.calls.append(("remove", row))


def _step(new=(), rows=(), new_blocks=()):
    return StepInput(1, list(new), list(rows), [0] * len(rows), [1] * len(rows), list(new_blocks), [])


def _apply(table, step):
    updates = table.apply(step)
    table.write(
        updates,
        *(
            torch.from_numpy(np.array(part, dtype=np.int64))
            for part in (updates.block_indices, updates.block_ids, updates.token_ids)
        ),
    )


def test_tokens_and_blocks_are_written_to_their_row():
    table = RequestTable(4, 10, 4, 100, CPU)
    _apply(
        table,
        _step(
            [NewRequest(2, [7, 8, 9], 2, [[5]], SamplingParams()), NewRequest(0, [1], 1, [[6]], SamplingParams())],
            [2, 0],
            [[], []],
        ),
    )
    _apply(table, _step([], [0, 2], [[], [[3, 1]]]))
    assert table.token_table[2, :3].tolist() == [7, 8, 9] and table.token_table[0, 0] == 1
    assert table.block_tables[0, 2].tolist() == [5, 3, 1] and table.block_tables[0, 0].tolist() == [6, 0, 0]
    assert table.num_prompt_tokens == [1, 0, 2, 0]


@pytest.fixture(params=["torch", "native"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "native":
        request.getfixturevalue("native_kernels")
    else:
        monkeypatch.setattr(KERNELS, "lib", None)


def test_whatever_a_request_brings_about_is_its_own_error():
    """MemoryError, too, is the request's own error; it once ended the engine."""

    class Greedy(Recorder):
        def add(self, row, new):
            raise MemoryError

    table = RequestTable(2, 10, 4, 100, CPU)
    table.register(Recorder())
    table.register(Greedy())
    _apply(table, _step([NewRequest(1, [7, 8], 2, [[5]], SamplingParams())], [1], [[]]))
    assert table.errors == {1: "MemoryError"} and table.token_table[1, :2].tolist() == [0, 0]


def test_append_writes_behind_each_row():
    table = RequestTable(3, 4, 4, 100, CPU)
    table.append(torch.tensor([2, 0]), torch.tensor([3, 1]), torch.tensor([50, 60]), max_position=3)
    assert table.token_table.tolist() == [[0, 60, 0, 0], [0] * 4, [0, 0, 0, 50]]


def test_append_beyond_the_context_goes_nowhere():
    table = RequestTable(3, 4, 4, 100, CPU)
    table.token_table[:] = 9
    table.append(torch.tensor([0, 1, 2]), torch.tensor([4, 3, 4]), torch.tensor([50, 60, 70]), max_position=4)
    assert table.token_table.tolist() == [[9] * 4, [9, 9, 9, 60], [9] * 4]


def test_append_of_a_failed_request():
    table = RequestTable(2, 4, 4, 100, CPU)
    table.token_table[:] = 9
    table.append(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([-1, 7]), max_position=2)
    assert table.token_table.tolist() == [[9, 0, 9, 9], [9, 9, 7, 9]]


def test_row_states_are_told_in_order():
    table, state = RequestTable(4, 10, 4, 100, CPU), Recorder()
    table.register(state)
    _apply(table, _step([NewRequest(1, [7], 1, [[5]], SamplingParams())], [1], [[]]))
    _apply(table, _step([NewRequest(1, [8], 1, [[6]], SamplingParams())], [1], [[]]))
    assert state.calls == [("remove", 1), ("add", 1)] * 2


def test_a_refused_request_fails_alone():
    table, state = RequestTable(4, 10, 4, 100, CPU), Recorder()
    table.register(state)
    bad, good, outside = (
        NewRequest(0, [7], 1, [[5]], SamplingParams(seed=13)),
        NewRequest(1, [8], 1, [[6]], SamplingParams()),
        NewRequest(2, [8, 100], 2, [[7]], SamplingParams()),
    )
    _apply(table, _step([bad, good, outside], [0, 1, 2], [[], [], []]))
    assert table.errors == {
        0: "unlucky",
        2: "the prompt contains token id 100, but the vocabulary has 100 tokens (0 to 99)",
    }
    # no id outside the vocabulary reaches the device
    assert table.token_table[:, :2].tolist() == [[0, 0], [8, 0], [0, 0], [0, 0]]
    assert state.calls[-1] == ("remove", 2)
    _apply(table, _step([NewRequest(0, [3], 1, [[5]], SamplingParams())], [0], [[]]))
    assert 0 not in table.errors


@pytest.mark.parametrize("token_ids", [[0, 99], []])
def test_ids_inside_the_vocabulary_pass(token_ids):
    check_token_ids("x", token_ids, 100)


@pytest.mark.parametrize("bad", [-1, 100])
def test_ids_outside_are_named(bad):
    with pytest.raises(ValueError, match=f"stop_token_ids contains token id {bad}, but the vocabulary has 100"):
        check_token_ids("stop_token_ids", [5, bad], 100)
