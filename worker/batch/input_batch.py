"""From a `StepInput` to the tensors of one forward pass.

Three index spaces meet here: the batch index `i` (the order of this step), the request `row` (of the tables), and the KV `slot`
(block id * block_size + offset). Per step one array of O(rows) integers, plus what is new in the tables, crosses to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from quire.worker.attention.base import AttentionBackend, AttentionMetadata
from quire.worker.batch.request_table import RequestTable
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.native import KERNELS
from quire.worker.messages import StepInput
from quire.worker.platforms.platform import Platform


@dataclass(slots=True)
class StepTensors:
    """What a forward pass of R requests and T tokens reads, at the beginning of the buffers."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    block_table: torch.Tensor  # [R, K] int32


class InputBuffers:
    """The tensors a forward pass reads, allocated once at their largest, so that a captured CUDA graph and an eager step read the same addresses."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_num_tokens = max_num_tokens
        self.input_ids = zeros(max_num_tokens, dtype=torch.int32)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slot_mapping = zeros(max_num_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = zeros(max_num_reqs, dtype=torch.int32)
        self.block_table = zeros(max_num_reqs, max_blocks, dtype=torch.int32)
        self.arange = torch.arange(max(max_num_tokens, max_num_reqs) + 1, device=device)

    def of_step(self, num_reqs: int, num_tokens: int, width: int) -> StepTensors:
        """The part that a step of that size uses; `width` entries of the block table."""
        return StepTensors(self.input_ids[:num_tokens], self.positions[:num_tokens], self.slot_mapping[:num_tokens], self.query_start_loc[: num_reqs + 1],
                           self.seq_lens[:num_reqs], self.block_table[:num_reqs, :width])


@dataclass(slots=True)
class SamplingBatch:
    """The S sampling requests of a step, in the order of `StepInput.samples`. The position of a sampled token is its index in the sequence."""

    rows: list[int]
    positions: list[int]
    rows_tensor: torch.Tensor  # [S] int64
    positions_tensor: torch.Tensor  # [S] int64
    logits_indices: torch.Tensor  # [S] int64, into the step's tokens


@dataclass(slots=True)
class InputBatch:
    """One step's view of the buffers: R requests, T tokens."""

    step: StepInput
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    query_start_loc: list[int]  # [R + 1], on the host
    attn: AttentionMetadata
    sampling: SamplingBatch
    wanted: torch.Tensor | None = None  # ascending indices of the tokens whose hidden states are read; None: of all


def prepare_inputs(step: StepInput, table: RequestTable, buffers: InputBuffers, platform: Platform, backend: AttentionBackend) -> InputBatch:
    """Bring the tables up to date with `step` and compute where its tokens stand, what they are, and where their keys and values go."""
    scheduled, computed = step.num_scheduled, step.num_computed
    num_reqs, num_tokens = len(step.rows), sum(scheduled)
    assert 0 < num_tokens <= buffers.max_num_tokens
    starts = [0, *accumulate(scheduled)]
    lengths = [c + s for c, s in zip(computed, scheduled)]
    updates = table.apply(step)
    sent, sizes = _send(platform, step.rows, computed, scheduled, starts, step.samples, updates.block_indices, updates.block_ids, updates.token_ids)
    if updates.block_indices or updates.token_rows:
        table.write(updates, *sent.split(sizes)[5:])
    tensors = buffers.of_step(num_reqs, num_tokens, -(-max(lengths) // table.block_size))
    if KERNELS.serve(platform.device):
        sampling = cpu_ops.fill_inputs(sent, num_reqs, len(step.samples), table.token_table, table.block_table, table.block_size, tensors)
    else:
        sampling = _fill(*sent.split(sizes)[:5], table.token_table, table.block_table, table.block_size, tensors, buffers.arange)
    attn = AttentionMetadata(backend, tensors.slot_mapping, tensors.query_start_loc, tensors.seq_lens, tensors.block_table, max(scheduled), max(lengths))
    return InputBatch(step, tensors.input_ids, tensors.positions, starts, attn, SamplingBatch([step.rows[i] for i in step.samples], [lengths[i] for i in step.samples], *sampling))


def _fill(rows: torch.Tensor, computed: torch.Tensor, scheduled: torch.Tensor, starts: torch.Tensor, samples: torch.Tensor, tokens: torch.Tensor, blocks: torch.Tensor,
          block_size: int, tensors: StepTensors, arange: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill `tensors` from the tables `tokens` and `blocks`. Returns the rows, the lengths and the last tokens of the requests in `samples`."""
    num_reqs, num_tokens, width = len(rows), len(tensors.positions), tensors.block_table.shape[1]
    # scheduled [2, 5, 3] -> req [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]; with computed [0, 4, 0] -> positions [0, 1, 4, 5, 6, 7, 8, 0, 1, 2]
    req = torch.repeat_interleave(arange[:num_reqs], scheduled, output_size=num_tokens)
    torch.add((computed - starts[:-1])[req], arange[:num_tokens], out=tensors.positions)
    positions, token_rows = tensors.positions, rows[req]
    torch.index_select(tokens.view(-1), 0, token_rows * tokens.shape[1] + positions, out=tensors.input_ids)
    block_ids = blocks.view(-1)[token_rows * blocks.shape[1] + positions // block_size]
    torch.add(block_ids * block_size, positions % block_size, out=tensors.slot_mapping)
    tensors.query_start_loc.copy_(starts)
    torch.add(computed, scheduled, out=tensors.seq_lens)
    torch.index_select(blocks[:, :width], 0, rows, out=tensors.block_table)
    return rows[samples], tensors.seq_lens[samples].long(), (starts[1:] - 1)[samples]


def _send(platform: Platform, *parts: list[int]) -> tuple[torch.Tensor, list[int]]:
    """All lists to the device in one copy: int64, one after another, and their sizes."""
    sizes = [len(part) for part in parts]
    packed = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
    return platform.to_device(packed), sizes
