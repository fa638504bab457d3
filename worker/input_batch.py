"""From a `StepInput` to the tensors of one forward pass.

Three index spaces meet here: the batch index `i` (the order of this step), the request `row` (of the tables), and the KV `slot`
(block id * block_size + offset). Per step one array of O(rows) integers, plus what is new in the tables, crosses to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from worker.attention.base import AttentionBackend, AttentionMetadata
from worker.messages import StepInput
from worker.platform import Platform
from worker.request_table import RequestTable


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


def prepare_inputs(step: StepInput, table: RequestTable, buffers: InputBuffers, platform: Platform, backend: AttentionBackend) -> InputBatch:
    """Bring the tables up to date with `step` and compute where its tokens stand, what they are, and where their keys and values go."""
    scheduled, computed = step.num_scheduled, step.num_computed
    num_reqs, num_tokens = len(step.rows), sum(scheduled)
    assert 0 < num_tokens <= buffers.max_num_tokens
    starts = [0, *accumulate(scheduled)]
    lengths = [c + s for c, s in zip(computed, scheduled)]
    updates = table.apply(step)
    rows, num_computed, num_scheduled, start_loc, samples, block_indices, block_ids, token_ids = _send(
        platform, step.rows, computed, scheduled, starts, step.samples, updates.block_indices, updates.block_ids, updates.token_ids)
    table.write(updates, block_indices, block_ids, token_ids)

    input_ids, positions, slot_mapping = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], buffers.slot_mapping[:num_tokens]
    query_start_loc, seq_lens = buffers.query_start_loc[: num_reqs + 1], buffers.seq_lens[:num_reqs]
    # num_scheduled [2, 5, 3] -> req [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]; with num_computed [0, 4, 0] -> positions [0, 1, 4, 5, 6, 7, 8, 0, 1, 2]
    req = torch.repeat_interleave(buffers.arange[:num_reqs], num_scheduled, output_size=num_tokens)
    torch.add((num_computed - start_loc[:-1])[req], buffers.arange[:num_tokens], out=positions)
    token_rows = rows[req]
    torch.index_select(table.token_table.view(-1), 0, token_rows * table.max_model_len + positions, out=input_ids)
    block_ids = table.block_table.view(-1)[token_rows * table.max_blocks + positions // table.block_size]
    torch.add(block_ids * table.block_size, positions % table.block_size, out=slot_mapping)
    query_start_loc.copy_(start_loc)
    torch.add(num_computed, num_scheduled, out=seq_lens)

    width = -(-max(lengths) // table.block_size)
    block_table = buffers.block_table[:num_reqs, :width]
    torch.index_select(table.block_table[:, :width], 0, rows, out=block_table)
    attn = AttentionMetadata(backend, slot_mapping, query_start_loc, seq_lens, block_table, max(scheduled), max(lengths))
    sampling = SamplingBatch([step.rows[i] for i in step.samples], [lengths[i] for i in step.samples], rows[samples], seq_lens[samples].long(),
                             (start_loc[1:] - 1)[samples])
    return InputBatch(step, input_ids, positions, starts, attn, sampling)


def _send(platform: Platform, *parts: list[int]) -> tuple[torch.Tensor, ...]:
    """All lists to the device in one copy, as int64 views in the same order."""
    sizes = [len(part) for part in parts]
    packed = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
    return platform.to_device(packed).split(sizes)
