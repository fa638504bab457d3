"""Converts a `StepInput` into the tensors of one forward pass.

Three index spaces meet here: the batch index `i` (order within this step), the request `row` (in the tables), and the
KV `slot` (block id * block_size + offset). Per step one array of O(rows) integers, plus new table entries, is copied to
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch

from quire.worker.attention.base import AttentionBackend, GroupedMetadata
from quire.worker.attention.cross_weights import CrossWeights
from quire.worker.batch.group_metadata import adapt
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import StepInput
from quire.worker.platforms.base import Platform
from quire.worker.platforms.step_tensors import StepTensors
from quire.worker.transformer.calls import Encoded
from quire.worker.transformer.vision.image_embeds import ImageEmbeds


class InputBuffers:
    """The input tensors of a forward pass, allocated once at their maximum size, so that a captured CUDA graph and an
    eager step read the same addresses.
    """

    def __init__(
        self, max_num_reqs: int, max_num_tokens: int, max_blocks: int, device: torch.device, num_groups: int = 1
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_num_tokens = max_num_tokens
        self.input_ids = zeros(max_num_tokens, dtype=torch.int32)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slot_mappings = zeros(num_groups, max_num_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = zeros(max_num_reqs, dtype=torch.int32)
        self.block_tables = zeros(num_groups, max_num_reqs, max_blocks, dtype=torch.int32)
        self.arange = torch.arange(max(max_num_tokens, max_num_reqs) + 1, device=device)

    def views_for_step(self, num_reqs: int, num_tokens: int, width: int) -> StepTensors:
        """Return views for a step of this size, with `width` entries per block table."""
        return StepTensors(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mappings[:, :num_tokens],
            self.query_start_loc[: num_reqs + 1],
            self.seq_lens[:num_reqs],
            self.block_tables[:, :num_reqs, :width],
        )


@dataclass(slots=True)
class SamplingBatch:
    """The S sampling requests of a step, in the order of `StepInput.samples`.

    The position of a sampled token is its index in the sequence. A request with d drafts has d + 1 sampling rows, at
    consecutive positions: the first samples after its last known token, the others after its drafts.
    """

    rows: list[int]
    positions: list[int]
    rows_tensor: torch.Tensor  # [S] int64
    positions_tensor: torch.Tensor  # [S] int64
    logits_indices: torch.Tensor  # [S] int64, into the step's tokens
    drafts: dict[int, list[int]] = field(default_factory=dict)  # first sampling row of a request -> its drafts


@dataclass(slots=True)
class InputBatch:
    """One step's view of the buffers: R requests, T tokens."""

    step: StepInput
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64, or [3, T] in a step with images of a model whose positions have three axes
    query_start_loc: list[int]  # [R + 1], on the host
    attn: GroupedMetadata
    max_query_len: int
    max_seq_len: int
    sampling: SamplingBatch
    # ascending indices of the tokens whose hidden states are needed; None: all
    needed_rows: torch.Tensor | None = None
    drafts: dict[int, list[int]] = field(default_factory=dict)  # batch position -> drafts that the step verifies
    images: ImageEmbeds | None = None  # on the first stage, if the step computes placeholders of images
    encoded: Encoded | None = None  # of requests that begin, for a model with cross-attention
    cross_weights: CrossWeights | None = None

    @property
    def is_recordable(self) -> bool:
        """Return whether the forward pass needs only tokens, positions and attention."""
        return self.images is None and self.encoded is None and self.cross_weights is None


def prepare_inputs(
    step: StepInput,
    table: RequestTable,
    buffers: InputBuffers,
    platform: Platform,
    backend: AttentionBackend,
    make_drafts: Callable[[], dict[int, list[int]]] | None = None,
    padded: int = 0,
) -> InputBatch:
    """Update the tables with `step` and compute the token ids, positions and KV slots of its tokens. `make_drafts`,
    called when the tables are up to date, returns the draft tokens of the batch positions in `step.num_draft`. The
    buffers are padded to `padded` requests, if that is more than the step has.
    """
    scheduled, computed = step.num_scheduled, step.num_computed
    num_reqs, num_tokens = len(step.rows), sum(scheduled)
    assert 0 < num_tokens <= buffers.max_num_tokens
    starts = [0, *accumulate(scheduled)]
    lengths = [c + s for c, s in zip(computed, scheduled)]
    updates = table.apply(step)
    sent, sizes = _send(
        platform,
        step.rows,
        computed,
        scheduled,
        starts,
        step.samples,
        updates.block_indices,
        updates.block_ids,
        updates.token_ids,
    )
    if updates.block_indices or updates.token_rows:
        table.write(updates, *sent.split(sizes)[5:])
    drafts = make_drafts() if make_drafts is not None else {}
    if drafts:
        _write_drafts(step, table, lengths, drafts)
    max_query_len = max(scheduled)
    width = max(-(-max(lengths) // table.block_size), table.cross_blocks, 2 if table.has_states else 1)
    extra = max(padded - num_reqs, 0)
    tensors = buffers.views_for_step(num_reqs + extra, num_tokens + extra, width)
    tables = table.token_table, table.block_tables, table.block_size
    sampling = platform.ops.fill_inputs(sent, sizes, *tables, tensors, buffers.arange, max_query_len)
    tensors = tensors.without_padding(num_reqs)
    attn = tensors.metadata(backend, max_query_len, max(lengths), (starts, lengths))
    attn = adapt(attn, table.groups, table.block_size, platform.to_device)
    return InputBatch(
        step,
        tensors.input_ids,
        tensors.positions,
        starts,
        attn,
        max_query_len,
        max(lengths),
        _verifying(step, lengths, starts, drafts, platform)
        if drafts
        else SamplingBatch([step.rows[i] for i in step.samples], [lengths[i] for i in step.samples], *sampling),
        drafts=drafts,
    )


def _write_drafts(step: StepInput, table: RequestTable, lengths: list[int], drafts: dict[int, list[int]]) -> None:
    rows, positions = [], []
    for i, token_ids in drafts.items():
        rows += [step.rows[i]] * len(token_ids)
        positions += range(lengths[i] - len(token_ids), lengths[i])
    table.write_drafts(rows, positions, list(chain.from_iterable(drafts.values())))


def _verifying(
    step: StepInput, lengths: list[int], starts: list[int], drafts: dict[int, list[int]], platform: Platform
) -> SamplingBatch:
    """Return the sampling rows of a step with drafts."""
    rows: list[int] = []
    positions: list[int] = []
    indices: list[int] = []
    by_row: dict[int, list[int]] = {}
    for i in step.samples:
        token_ids = drafts.get(i, [])
        if token_ids:
            by_row[len(rows)] = token_ids
        count = 1 + len(token_ids)
        rows += [step.rows[i]] * count
        positions += range(lengths[i] - count + 1, lengths[i] + 1)
        indices += range(starts[i + 1] - count, starts[i + 1])
    sent = platform.to_device(np.array([rows, positions, indices], dtype=np.int64))
    return SamplingBatch(rows, positions, *sent, by_row)


def _send(platform: Platform, *parts: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Copy all lists to the device at once, as one int64 tensor. Returns the tensor and the lengths of the lists."""
    sizes = [len(part) for part in parts]
    packed = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
    return platform.to_device(packed), sizes
