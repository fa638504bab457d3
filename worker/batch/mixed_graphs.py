"""CUDA graphs for steps with prompts: everything except attention and recurrent states is recorded, per number of
tokens (`piece_sizes.py`).

A recording is a list of pieces, which operations whose launches depend on the lengths of the requests separate. Those
run between the pieces as in an eager step. They take their inputs from buffers that earlier pieces fill, and write
their result into a buffer that the next piece reads.

An eager step of few tokens is bound by the host: 12 to 20 ms on the host of an H200 for the 28 layers of Qwen3 0.6B,
3 to 5 in pieces (`benchmarks/gpu.py mixed`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from quire.worker.attention.base import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    GroupedMetadata,
    StepBackend,
    TokenOp,
)
from quire.worker.batch.input_batch import InputBatch, InputBuffers
from quire.worker.layers.state import PieceEnd
from quire.worker.messages import CacheGroup, StepInput
from quire.worker.parallel import Group

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Forward = Callable[[torch.Tensor, torch.Tensor, GroupedMetadata], torch.Tensor]
# Runs a function twice, the second time under capture; the function calls its argument where a piece ends. Returns a
# replay function per piece.
RecordPieces = Callable[[Callable[[Callable[[], None]], None]], list[Replay]]

_KINDS = ("full", "window", "chunk", "state")


@dataclass(frozen=True, slots=True)
class _Between:
    """An operation between two pieces, for the requests of cache group `group`. `run` may write its result into the
    last argument, rows of `out`.
    """

    run: Callable[[AttentionMetadata, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
    group: int
    inputs: tuple[torch.Tensor, ...]  # [T, ..] each
    out: torch.Tensor  # [T, ..]


@dataclass(frozen=True, slots=True)
class _Recorded:
    pieces: list[Replay]
    num_exchanges: list[int]  # between ranks, in each piece
    between: list[_Between]
    hidden: torch.Tensor  # [T, H], which the last piece overwrites


# (key, run, inputs, shape and dtype of a token's result) -> the buffer of results
_Take = Callable[..., torch.Tensor]


class _Cut(StepBackend):
    """Ends a piece instead of attending."""

    name = "cut"

    def __init__(self, inner: AttentionBackend, take: _Take):
        super().__init__(inner)
        self._take = take

    def attend(self, call: AttentionCall) -> torch.Tensor:
        k_cache, v_cache = call.k_cache, call.v_cache
        facts = call.scale, call.sliding_window, call.soft_cap, call.sinks

        def run(meta: AttentionMetadata, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            return meta.backend.attend(AttentionCall(inputs[0], k_cache, v_cache, meta, *facts, out=out))

        return self._take("attention", run, (call.q,), (call.q.shape[1], v_cache.shape[3]), call.q.dtype)

    def apart(
        self, op: TokenOp, meta: AttentionMetadata, shape: tuple[int, ...], *tokens: torch.Tensor
    ) -> torch.Tensor:
        return self._take("apart", lambda meta, inputs, out: op(meta, *inputs), tokens, shape, tokens[0].dtype)


class MixedGraphs:
    """A forward pass for steps of at most `sizes[-1]` tokens."""

    def __init__(
        self,
        forward: Forward,
        buffers: InputBuffers,
        backend: AttentionBackend,
        max_model_len: int,
        record: RecordPieces,
        sizes: Sequence[int],
        ranks: Group,
    ) -> None:
        self.forward, self.buffers, self.backend = forward, buffers, backend
        self.max_model_len, self.record = max_model_len, record
        self.sizes, self._ranks = list(sizes), ranks
        self._recorded: dict[int, _Recorded] = {}
        # shared by all layers and sizes: (what, shape of a row, dtype) -> [largest size, ..], and its parts in use
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._rows: dict[tuple, torch.Tensor] = {}

    @staticmethod
    def applies(groups: Sequence[CacheGroup]) -> bool:
        """Return whether all layers attend over the step's tokens alone, as far as their cache group shows."""
        return all(group.kind in _KINDS and group.shares_outputs for group in groups)

    def padded_size(self, step: StepInput) -> int:
        """Return the number of requests, with one token of padding each, to which the buffers are padded for `step`; 0
        if no recording applies, or if there are not as many requests.
        """
        num_tokens = sum(step.num_scheduled)
        size = self.size_of(num_tokens)
        padded = len(step.rows) + size - num_tokens
        return padded if size and padded <= len(self.buffers.seq_lens) else 0

    def size_of(self, num_tokens: int) -> int:
        """Return the number of tokens of the recording for a step, 0 if there is none."""
        place = bisect_left(self.sizes, num_tokens)
        size = self.sizes[place] if place < len(self.sizes) else 0
        return size if size in self._recorded else 0

    def __call__(self, batch: InputBatch) -> torch.Tensor | None:
        """Return hidden states of the step's tokens, or of `needed_rows`, valid until the next call; None if no
        recording applies.
        """
        num_tokens = len(batch.input_ids)
        size = self.size_of(num_tokens) if batch.is_recordable else 0
        if not size:
            return None
        if size > num_tokens and not self.padded_size(batch.step):
            self._pad(num_tokens, size)
        recorded = self._recorded[size]
        for meta in batch.attn:
            meta.backend.build(meta)
        self._replay(recorded, batch.attn, num_tokens)
        return recorded.hidden[:num_tokens] if batch.needed_rows is None else recorded.hidden[batch.needed_rows]

    def _replay(self, recorded: _Recorded, attn: GroupedMetadata, num_tokens: int) -> None:
        rows: dict[int, torch.Tensor] = {}  # a buffer serves many layers: its rows are taken once per step

        def cut_to_step(tensor: torch.Tensor) -> torch.Tensor:
            found = rows.get(id(tensor))
            if found is None:
                found = rows[id(tensor)] = tensor[:num_tokens]
            return found

        ranks = self._ranks
        for piece, number, between in zip(recorded.pieces, recorded.num_exchanges, recorded.between):
            piece()
            ranks.num_exchanges += number
            out = cut_to_step(between.out)
            result = between.run(attn[between.group], [cut_to_step(one) for one in between.inputs], out)
            if result.data_ptr() != out.data_ptr():
                out.copy_(result)
        recorded.pieces[-1]()
        ranks.num_exchanges += recorded.num_exchanges[-1]

    def _pad(self, start: int, stop: int) -> None:
        """Fill tokens with token 0 at position 0, in the null block."""
        for tensor in (self.buffers.input_ids, self.buffers.positions, *self.buffers.slot_mappings):
            tensor[start:stop].zero_()

    def record_next(self) -> bool:
        """Record the largest size not recorded yet. Returns whether more are left. Changes the buffers.

        Raises RuntimeError if that fails and there are several ranks.
        """
        missing = [size for size in self.sizes if size not in self._recorded]
        if not missing:
            return False
        try:
            self._recorded[missing[-1]] = self._record(missing[-1])
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if self._ranks.size > 1:  # the other ranks wait for this one, without an error of their own
                raise RuntimeError(f"no CUDA graphs for {missing[-1]} tokens on rank {self._ranks.rank}") from error
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
        buffers, recording = self.buffers, _Recording(self, size, self._ranks)
        self._pad(0, size)

        def run(cut: Callable[[], None]) -> None:
            recording.begin(cut)
            hidden = self.forward(buffers.input_ids[:size], buffers.positions[:size], self._metadata(recording))
            recording.end(hidden)

        pieces = self.record(run)
        assert len(pieces) == len(recording.between) + 1
        counts = [after - before for before, after in pairwise(recording.exchanges)]
        return _Recorded(pieces, counts, recording.between, recording.hidden)

    def _metadata(self, recording: _Recording) -> GroupedMetadata:
        """Return metadata of which only the slots are read."""
        tensors = self.buffers.views_for_step(1, recording.size, self.buffers.block_tables.shape[2])
        attn = tensors.metadata(self.backend, recording.size, self.max_model_len)
        for group, meta in enumerate(attn):
            take = recording.taking(group)
            meta.backend, meta.extra = _Cut(self.backend, take), PieceEnd(take)
        return attn

    def rows_of(self, what: tuple, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype, size: int):
        """Return rows of a shared buffer, zeroed before its first use, so that values in padding rows are finite."""
        key = *what, *shape, dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(self.sizes[-1], *shape, dtype=dtype)
        if (key, size) not in self._rows:
            self._rows[key, size] = self._buffers[key][:size]
        return self._rows[key, size]


class _Recording:
    """Handles the ends of pieces while a size is recorded. A recorder runs the pass twice; the second one
    counts.
    """

    def __init__(self, graphs: MixedGraphs, size: int, ranks: Group) -> None:
        self.graphs, self.size, self._ranks = graphs, size, ranks
        self.between: list[_Between] = []
        self.exchanges: list[int] = []
        self._results: set[int] = set()  # memory of results, which no piece overwrites

    def begin(self, cut: Callable[[], None]) -> None:
        """Begin a pass whose pieces end by `cut`."""
        self._cut, self.between, self.exchanges = cut, [], [self._ranks.num_exchanges]

    def end(self, hidden: torch.Tensor) -> None:
        """End the last piece."""
        self.hidden = hidden
        self.exchanges.append(self._ranks.num_exchanges)

    def taking(self, group: int) -> _Take:
        """Return what an operation on the requests of cache group `group` calls instead of running."""

        def take(
            key: object,
            run: Callable[..., torch.Tensor],
            inputs: Sequence[torch.Tensor],
            shape: tuple[int, ...],
            dtype: torch.dtype,
        ) -> torch.Tensor:
            kept = tuple(self._kept((key, i), one) for i, one in enumerate(inputs))
            out = self.graphs.rows_of((key, "out"), shape, inputs[0], dtype, self.size)
            self._results.add(out.untyped_storage().data_ptr())
            self.between.append(_Between(run, group, kept, out))
            self.exchanges.append(self._ranks.num_exchanges)
            self._cut()
            return out

        return take

    def _kept(self, what: tuple, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that no later piece overwrites; a part of an earlier operation's result is one itself."""
        if tensor.untyped_storage().data_ptr() in self._results:
            return tensor
        rows = self.graphs.rows_of(what, tensor.shape[1:], tensor, tensor.dtype, self.size)
        return rows.copy_(tensor)
