"""The worker half of the worked example in docs/architecture.md: two `StepInput`s, every resulting tensor, and
attention over them.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.batch.input_batch import InputBatch, InputBuffers, prepare_inputs
from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from tests.helpers.worker.steps import Script

BLOCK_SIZE, MAX_MODEL_LEN = 2, 12
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34, 35, 36, 37]]
GREEDY = SamplingParams(temperature=0.0)
STEP_1 = StepInput(
    1,
    [
        NewRequest(0, PROMPTS[0], 3, [[1, 2]], GREEDY, scope="\0"),
        NewRequest(1, PROMPTS[1], 2, [[3]], GREEDY, scope="\0"),
        NewRequest(2, PROMPTS[2], 8, [[4, 5, 6]], GREEDY, scope="\0"),
    ],
    rows=[0, 1, 2],
    num_computed=[0, 0, 0],
    num_scheduled=[3, 2, 5],
    new_blocks=[[], [], []],
    samples=[0, 1],
)
STEP_2 = StepInput(
    2,
    [],
    rows=[0, 1, 2],
    num_computed=[3, 2, 5],
    num_scheduled=[1, 1, 3],
    new_blocks=[[], [[7]], [[8]]],
    samples=[0, 1, 2],
)


class Setup:
    def __init__(self, max_num_reqs=3, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, max_num_tokens=10):
        self.platform, self.backend = CpuPlatform(), CpuPagedAttention()
        self.table = RequestTable(max_num_reqs, max_model_len, block_size, 100, self.platform)
        self.buffers = InputBuffers(max_num_reqs, max_num_tokens, self.table.max_blocks, self.platform.device)

    def prepare(self, step: StepInput) -> InputBatch:
        return prepare_inputs(step, self.table, self.buffers, self.platform, self.backend)


def _sample(setup: Setup, batch: InputBatch, token_ids: list[int]) -> None:
    setup.table.append(
        batch.sampling.rows_tensor, batch.sampling.positions_tensor, torch.tensor(token_ids), batch.attn[0].max_seq_len
    )


def test_first_step():
    setup = Setup()
    assert setup.table.token_table.shape == (3, 12) and setup.table.block_tables[0].shape == (3, 6)
    batch = setup.prepare(STEP_1)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    # token indices 0 1 2, 12 13, 24 25 26 27 28
    assert batch.input_ids.tolist() == [10, 11, 12, 20, 21, 30, 31, 32, 33, 34]
    assert setup.table.token_table.view(-1)[[0, 1, 2, 12, 13, 24, 25, 26, 27, 28]].tolist() == batch.input_ids.tolist()
    assert setup.table.block_tables[0].tolist() == [[1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0]]
    assert batch.attn[0].slot_mapping.tolist() == [2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert batch.attn[0].query_start_loc.tolist() == batch.query_start_loc == [0, 3, 5, 10]
    assert batch.attn[0].seq_lens.tolist() == [3, 2, 5]
    assert batch.attn[0].block_table.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert (len(batch.step.rows), len(batch.input_ids), batch.attn[0].max_query_len, batch.attn[0].max_seq_len) == (
        3,
        10,
        5,
        5,
    )
    assert batch.sampling.logits_indices.tolist() == [2, 4]
    assert batch.sampling.rows == batch.sampling.rows_tensor.tolist() == [0, 1]
    assert batch.sampling.positions == batch.sampling.positions_tensor.tolist() == [3, 2]


def test_second_step_reads_what_was_sampled():
    setup = Setup()
    _sample(setup, setup.prepare(STEP_1), [13, 22])
    batch = setup.prepare(STEP_2)
    assert batch.positions.tolist() == [3, 2, 5, 6, 7]
    assert batch.input_ids.tolist() == [13, 22, 35, 36, 37]  # token indices 3, 14, 29 30 31
    assert setup.table.token_table.view(-1)[[3, 14, 29, 30, 31]].tolist() == batch.input_ids.tolist()
    assert setup.table.block_tables[0][:, :4].tolist() == [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]]
    assert batch.attn[0].slot_mapping.tolist() == [5, 14, 13, 16, 17]
    assert batch.attn[0].query_start_loc.tolist() == [0, 1, 2, 5] and batch.attn[0].seq_lens.tolist() == [4, 3, 8]
    assert (len(batch.step.rows), len(batch.input_ids), batch.attn[0].max_query_len, batch.attn[0].max_seq_len) == (
        3,
        5,
        3,
        8,
    )
    assert batch.sampling.logits_indices.tolist() == [0, 1, 4] and batch.sampling.positions == [4, 3, 8]


def test_attention_over_the_example_is_dense_attention():
    setup = Setup()
    torch.manual_seed(0)
    heads, dim, lengths = 2, 4, [4, 3, 8]
    q, k, v = ([torch.randn(length, heads, dim) for length in lengths] for _ in range(3))
    cache = torch.full((2, 9, BLOCK_SIZE, heads, dim), float("nan"))
    cache[:, 0] = 0
    for step, spans in ((STEP_1, [(0, 3), (0, 2), (0, 5)]), (STEP_2, [(3, 4), (2, 3), (5, 8)])):
        batch = setup.prepare(step)
        now_q, now_k, now_v = (torch.cat([x[a:b] for x, (a, b) in zip(xs, spans)]) for xs in (q, k, v))
        setup.backend.write_kv(now_k, now_v, cache[0], cache[1], batch.attn[0].slot_mapping)
        setup.backend.build(batch.attn[0])
        out = setup.backend.forward(now_q, cache[0], cache[1], batch.attn[0], dim**-0.5)
        for i, (a, b) in enumerate(spans):
            # request 2: the 5 x 5 triangle in the first step, rows of length 8 in the second
            mask = torch.ones(b, b, dtype=torch.bool).tril()[a:]
            scores = torch.einsum("qhd,khd->hqk", q[i][a:b], k[i][:b]) * dim**-0.5
            want = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v[i][:b])
            torch.testing.assert_close(out[batch.query_start_loc[i] : batch.query_start_loc[i + 1]], want)


def test_batch_order_is_the_schedulers_and_rows_are_stable():
    setup = Setup()
    setup.prepare(STEP_1)
    batch = setup.prepare(
        StepInput(2, [], rows=[2, 0], num_computed=[5, 3], num_scheduled=[1, 1], new_blocks=[[], []], samples=[1])
    )
    assert batch.positions.tolist() == [5, 3] and batch.attn[0].slot_mapping.tolist() == [13, 5]
    assert batch.sampling.rows == [0] and batch.sampling.logits_indices.tolist() == [1]


def test_a_row_is_freed_by_being_overwritten():
    setup = Setup()
    setup.prepare(STEP_1)
    # a prompt of 2 and one output: preempted and back, in new blocks
    again = NewRequest(1, [40, 41, 42], 2, [[9, 4]], GREEDY)
    batch = setup.prepare(
        StepInput(2, [again], rows=[1], num_computed=[0], num_scheduled=[3], new_blocks=[[]], samples=[0])
    )
    assert batch.input_ids.tolist() == [40, 41, 42] and batch.attn[0].slot_mapping.tolist() == [18, 19, 8]
    assert setup.table.num_prompt_tokens[1] == 2


def test_buffers_keep_their_addresses():
    setup = Setup()
    addresses = [setup.buffers.input_ids.data_ptr(), setup.buffers.block_tables.data_ptr()]
    for step in (STEP_1, STEP_2):
        batch = setup.prepare(step)
        assert [batch.input_ids.data_ptr(), batch.attn[0].block_table.data_ptr()] == addresses


def test_native_tensors_are_the_twins(native_kernels, monkeypatch):
    """The two steps, and steps of several tokens in a mixed order: every tensor of the batch."""

    def play() -> list[list]:
        setup = Setup()
        batches = [setup.prepare(STEP_1)]
        _sample(setup, batches[0], [13, 22])
        results = []
        for step in (
            None,
            STEP_2,
            StepInput(3, [], [2, 0], [8, 4], [1, 2], [[], [[9]]], [1, 0]),
            StepInput(4, [], [1], [3], [1], [[]], []),
        ):
            batch = setup.prepare(step) if step else batches[0]
            attn, sampling = batch.attn[0], batch.sampling
            tensors = (
                batch.input_ids,
                batch.positions,
                attn.slot_mapping,
                attn.query_start_loc,
                attn.seq_lens,
                attn.block_table,
                sampling.rows_tensor,
                sampling.positions_tensor,
                sampling.logits_indices,
            )
            results.append([(tensor.dtype, tensor.tolist()) for tensor in tensors])
        return results

    native = play()
    monkeypatch.setattr(native_kernels, "lib", None)
    assert native == play()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_schedules_agree_with_the_definition(block_size):
    torch.manual_seed(block_size)
    setup, script = (
        Setup(max_num_reqs=8, max_model_len=50, block_size=block_size, max_num_tokens=64),
        Script(block_size),
    )
    for row in range(8):
        script.add(row, torch.randint(0, 100, (30,)).tolist())
    for _ in range(6):
        order = torch.randperm(8)[: torch.randint(1, 9, ())].tolist()
        step = script.step({row: int(torch.randint(1, 6, ())) for row in order})
        batch = setup.prepare(step)
        want_ids, want_positions, want_slots = [], [], []
        for row, computed, count in zip(step.rows, step.num_computed, step.num_scheduled):
            for position in range(computed, computed + count):
                want_ids.append(script.rows[row].prompt[position])
                want_positions.append(position)
                want_slots.append(script.rows[row].blocks[position // block_size] * block_size + position % block_size)
        assert (
            batch.input_ids.tolist() == want_ids
            and batch.positions.tolist() == want_positions
            and batch.attn[0].slot_mapping.tolist() == want_slots
        )
