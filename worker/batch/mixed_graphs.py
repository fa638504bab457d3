"""CUDA graphs for steps with prompts, of few tokens: everything but attention is recorded by the number of tokens.

A recording is a list of pieces: the first up to the first attention, one between each two, and the last one. Attention
runs between them as in an eager step, because its launches depend on the lengths of the requests. It takes its queries
from a buffer that the piece before fills, and its result goes into one that the next piece reads.

An eager step of few tokens is bound by the host: 12 to 20 ms on the host of an H200 for the 28 layers of Qwen3 0.6B,
3 to 5 in pieces (`benchmarks/gpu.py mixed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, AttentionMetadata, GroupedMetadata, StepBackend
from quire.worker.batch.input_batch import InputBatch, InputBuffers
from quire.worker.messages import CacheGroup, StepInput

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Forward = Callable[[torch.Tensor, torch.Tensor, GroupedMetadata], torch.Tensor]
# Runs a function twice, the second time under capture; the function calls its argument where a piece ends. Returns how
# to replay each piece.
RecordPieces = Callable[[Callable[[Callable[[], None]], None]], list[Replay]]

# tokens: below 128 a step takes the same time, above padding costs at most a third of it
SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call between two pieces: with these queries `[T, ..]`, of the layers of cache group `group`, into `out`."""

    call: AttentionCall
    group: int
    out: torch.Tensor  # [T, num_heads, v_head_dim]


@dataclass(frozen=True, slots=True)
class _Recorded:
    pieces: list[Replay]
    attentions: list[_Attention]
    hidden: torch.Tensor  # [T, H], which the last piece overwrites


class _Cut(StepBackend):
    """Ends a piece instead of attending."""

    name = "cut"

    def __init__(self, inner: AttentionBackend, take: Callable[[AttentionCall], torch.Tensor]):
        super().__init__(inner)
        self._take = take

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self._take(call)


class MixedGraphs:
    """A forward pass for steps of at most `SIZES[-1]` tokens."""

    def __init__(
        self,
        forward: Forward,
        buffers: InputBuffers,
        backend: AttentionBackend,
        max_model_len: int,
        record: RecordPieces,
    ) -> None:
        self.forward, self.buffers, self.backend = forward, buffers, backend
        self.max_model_len, self.record = max_model_len, record
        self.sizes = [size for size in SIZES if size <= buffers.max_num_tokens]
        self._recorded: dict[int, _Recorded] = {}
        # shared by all layers and sizes: (what, heads, size of a head) -> [largest size, heads, size of a head]
        self._rows: dict[tuple[str, int, int], torch.Tensor] = {}

    @staticmethod
    def applies(groups: Sequence[CacheGroup]) -> bool:
        """Return whether all layers attend, over the tokens as the step has them."""
        return all(group.kind in ("full", "window") and group.shares_outputs for group in groups)

    def padded_size(self, step: StepInput) -> int:
        """Return the number of requests, with one token of padding each, to which the buffers must be padded for
        `step`; 0 if no recording applies.
        """
        num_tokens = sum(step.num_scheduled)
        size = self._size(num_tokens)
        padded = len(step.rows) + size - num_tokens
        return padded if size in self._recorded and padded <= len(self.buffers.seq_lens) else 0

    def _size(self, num_tokens: int) -> int:
        """Return the smallest size with room for the tokens, 0 if there is none."""
        return next((size for size in self.sizes if size >= num_tokens), 0)

    def __call__(self, batch: InputBatch) -> torch.Tensor | None:
        """Return hidden states of the step's tokens, or of `needed_rows`, valid until the next call; None if no
        recording applies.
        """
        if not batch.is_recordable or not self.padded_size(batch.step):
            return None
        num_tokens = len(batch.input_ids)
        recorded = self._recorded[self._size(num_tokens)]
        for meta in batch.attn:
            meta.backend.build(meta)
        for piece, attention in zip(recorded.pieces, recorded.attentions):
            piece()
            call, meta = attention.call, batch.attn[attention.group]
            attention.out[:num_tokens] = meta.backend.attend(replace(call, q=call.q[:num_tokens], meta=meta))
        recorded.pieces[-1]()
        return recorded.hidden[:num_tokens] if batch.needed_rows is None else recorded.hidden[batch.needed_rows]

    def record_next(self) -> bool:
        """Record the largest size not recorded yet. Returns whether more are left. Changes the buffers."""
        missing = [size for size in self.sizes if size not in self._recorded]
        if not missing:
            return False
        try:
            self._recorded[missing[-1]] = self._record(missing[-1])
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            logger.warning(
                "no CUDA graphs for steps with prompts of %d tokens and fewer, running these eagerly: %s: %s",
                missing[-1],
                type(error).__name__,
                error,
            )
            self.sizes = [size for size in self.sizes if size in self._recorded]
            return False
        return len(missing) > 1

    def _record(self, size: int) -> _Recorded:
        buffers, attentions, outputs = self.buffers, [], []
        for tensor in (buffers.input_ids, buffers.positions, *buffers.slot_mappings):
            tensor[:size].zero_()

        def run(cut: Callable[[], None]) -> None:
            attentions.clear()

            def take(call: AttentionCall, group: int) -> torch.Tensor:
                q = self._rows_of("q", call.q, call.q.shape[2], size)
                out = self._rows_of("out", call.q, call.v_cache.shape[3], size)
                q.copy_(call.q)
                attentions.append(_Attention(replace(call, q=q, meta=None), group, out))
                cut()
                return out

            outputs.append(self.forward(buffers.input_ids[:size], buffers.positions[:size], self._metadata(size, take)))

        pieces = self.record(run)
        assert len(pieces) == len(attentions) + 1
        return _Recorded(pieces, list(attentions), outputs[-1])

    def _metadata(self, size: int, take: Callable[[AttentionCall, int], torch.Tensor]) -> GroupedMetadata:
        """Return metadata of which only the slots are read."""
        tensors = self.buffers.of_step(1, size, self.buffers.block_tables.shape[2])
        return tuple(
            AttentionMetadata(
                _Cut(self.backend, lambda call, group=group: take(call, group)),
                slots,
                tensors.query_start_loc,
                tensors.seq_lens,
                table,
                size,
                self.max_model_len,
            )
            for group, (slots, table) in enumerate(zip(tensors.slot_mappings, tensors.block_tables))
        )

    def _rows_of(self, what: str, q: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Zeros before the first use, so that what padding leaves behind is finite."""
        key = what, q.shape[1], dim
        if key not in self._rows:
            self._rows[key] = q.new_zeros(self.sizes[-1], *key[1:])
        return self._rows[key][:size]
