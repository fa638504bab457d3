"""worker/cuda/kernels/triton_step.py under Triton's interpreter (compiled on a GPU) against torch."""

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.batch.input_batch import InputBuffers
from quire.worker.cuda.kernels import triton_step
from quire.worker.platforms.ops import Ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
ROWS, LENGTH, PAGE, GROUPS = 9, 640, 4, 2


def filled(ops, computed, scheduled, samples, padded):
    """(the results of `fill_inputs`, the buffers) of a step in buffers that an earlier step has used."""
    generator, num = torch.Generator().manual_seed(0), len(scheduled)
    rows = torch.randperm(ROWS, generator=generator)[:num].tolist()
    starts = torch.tensor([0, *scheduled]).cumsum(0).tolist()
    tokens = torch.randint(1, 1000, (ROWS, LENGTH), generator=generator, dtype=torch.int32)
    blocks = torch.randint(1, 50, (GROUPS, ROWS, LENGTH // PAGE), generator=generator, dtype=torch.int32)
    buffers = InputBuffers(ROWS, 700, LENGTH // PAGE, DEVICE, GROUPS)
    used = buffers.views_for_step(ROWS, 700, LENGTH // PAGE)
    for field in fields(used):
        getattr(used, field.name).fill_(77)
    parts = rows, computed, scheduled, starts, samples, [5, 5, 5]  # followed by what `write` takes
    packed = torch.tensor([number for part in parts for number in part]).to(DEVICE)
    extra = padded - num
    width = -(-max(c + s for c, s in zip(computed, scheduled)) // PAGE)
    tensors = buffers.views_for_step(padded, starts[-1] + extra, width)
    sampling = ops.fill_inputs(
        packed, [len(part) for part in parts], tokens.to(DEVICE), blocks.to(DEVICE), PAGE, tensors, buffers.arange,
        max(scheduled),
    )  # fmt: skip
    return sampling, used


@pytest.mark.parametrize(
    "computed, scheduled, samples, padded",
    [
        ([5, 0, 17], [1, 1, 1], [0, 1, 2], 8),
        ([3, 9], [1, 1], [1], 2),
        ([0, 30, 7, 3], [3, 1, 530, 9], [1, 3], 4),
        ([600], [1], [], 1),
    ],
)
def test_inputs_and_padding_are_those_of_torch(computed, scheduled, samples, padded):
    results, buffers = filled(triton_step, computed, scheduled, samples, padded)
    want_results, want = filled(Ops(), computed, scheduled, samples, padded)
    for got, expected in zip(results, want_results):
        assert torch.equal(got, expected) and got.dtype == expected.dtype
    for field in fields(want):  # what comes after the padding is unchanged
        assert torch.equal(getattr(buffers, field.name), getattr(want, field.name)), field.name


def test_padding_is_a_request_of_one_token_in_the_null_block():
    _, buffers = filled(Ops(), [5, 0, 17], [1, 1, 1], [0, 1, 2], 5)
    padding = slice(3, 5)
    assert not buffers.input_ids[padding].any() and not buffers.positions[padding].any()
    assert not buffers.slot_mappings[:, padding].any() and not buffers.block_tables[:, padding, 0].any()
    assert buffers.seq_lens[padding].tolist() == [1, 1] and buffers.query_start_loc[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffers.seq_lens[5] == 77 and buffers.input_ids[5] == 77  # nothing after it


@pytest.mark.parametrize("most", [LENGTH - 1, LENGTH])
def test_appending_equals_torch(most):
    rows = torch.arange(ROWS).flip(0).to(DEVICE)
    positions = torch.tensor([3, LENGTH - 1, 0, 1, 2, most, 9, 10, most], device=DEVICE)
    token_ids = torch.tensor([4, 5, -1, 7, 8, 9, 10, 11, -1], device=DEVICE)
    tables = [torch.full((ROWS, LENGTH), 3, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for ops, table in zip((triton_step, Ops()), tables):
        ops.append_tokens(table, rows, positions, token_ids, most)
    assert torch.equal(*tables) and tables[0][ROWS - 3, 0] == 0


def test_writing_equals_torch():
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(900, generator=generator)[:600].to(DEVICE)
    values = torch.randint(0, 99, (600,), generator=generator).to(DEVICE)
    tables = [torch.zeros(900, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for ops, table in zip((triton_step, Ops()), tables):
        ops.write_entries(table, indices, values)
    assert torch.equal(*tables) and tables[0].any()
