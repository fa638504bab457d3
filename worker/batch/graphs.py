"""CUDA graphs for steps in which every request has one token: record the forward pass once per padded batch size, then
replay it with one call.

Eager steps and graphs read the same `InputBuffers`, which `prepare_inputs` fills and pads. Padding rows are requests of
one token in the null block, so they overwrite no data of a request.

Sizes are recorded while no request runs, one at a time, the largest first, so that smaller ones fit into its memory. A
server that is never idle records a size once it is frequent, and then no other for many steps: a recording takes as
long as a few eager steps, and this bounds the delay of running requests.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from quire.worker.attention.base import AttentionBackend, GroupedMetadata
from quire.worker.batch.input_batch import InputBatch, InputBuffers
from quire.worker.batch.mixed_graphs import MixedGraphs
from quire.worker.messages import StepInput
from quire.worker.parallel import tp
from quire.worker.platforms.step_tensors import StepTensors

logger = logging.getLogger(__name__)

# (input_ids, positions, attn) -> hidden
Forward = Callable[[torch.Tensor, torch.Tensor, GroupedMetadata], torch.Tensor]
Replay = Callable[[], None]
Size = tuple[int, bool]  # of a recording: number of requests, and whether some may have LoRA adapters


class RecordedAdapters(Protocol):
    """The LoRA adapters of steps (`lora/adapters.py`)."""

    @property
    def fit_slots(self) -> bool: ...
    def use_slots(self, max_rows: int) -> None: ...
    def fill_slots(self, size: int) -> None: ...
    def recording(self, size: int) -> AbstractContextManager[None]: ...


_SEEN_OFTEN = 8  # a size is recorded between steps after this many steps of it
_STEPS_BETWEEN = 128  # minimum number of steps between two recordings while requests run


def padded_sizes(max_num_seqs: int, largest: int = 1024) -> list[int]:
    """Return batch sizes to record: 1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 32 up to 512 and of 64
    above. Padding costs at most an eighth of a large step.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, largest + 1, 64)]
    return [size for size in sizes if size < max_num_seqs] + ([max_num_seqs] if max_num_seqs <= largest else [])


class CudaGraphs:
    """A forward pass for `ModelRunner.forward`: replays a graph if one applies, else runs `eager`.

    `record(function)` runs `function` once under capture and returns a function that replays it. All recordings share
    one memory pool; the largest determines most of its size.
    """

    def __init__(
        self,
        forward: Forward,
        eager: Callable[[InputBatch, bool], torch.Tensor],
        buffers: InputBuffers,
        backend: AttentionBackend,
        max_model_len: int,
        record: Callable[[Callable[[], None]], Replay] | None = None,
        adapt: Callable[[GroupedMetadata], GroupedMetadata] | None = None,
        adapters: RecordedAdapters | None = None,
        mixed: MixedGraphs | None = None,
    ) -> None:
        self.adapt = adapt or (lambda attn: attn)  # computes on the device in each step, from the buffers' metadata
        self.forward, self.eager, self.buffers, self.backend = forward, eager, buffers, backend
        self.max_model_len = max_model_len
        self.sizes = padded_sizes(min(buffers.seq_lens.shape[0], buffers.max_num_tokens))
        self.record = record or CudaRecorder()
        self.adapters, self.mixed = adapters, mixed
        if adapters is not None:
            adapters.use_slots(self.sizes[-1])
        # steps without an adapter keep a recording without LoRA kernels
        self.recordings: list[Size] = [(size, False) for size in self.sizes]
        self.recordings += [(size, True) for size in self.sizes] if adapters is not None else []
        self._seen: Counter[Size] = Counter()
        # counted in steps, not seconds: all ranks must record in the same step
        self._num_steps = self._may_record_at = 0
        # padded size -> (replay function, hidden states [size, H] that it overwrites), or None if this size runs
        # eagerly
        self._graphs: dict[Size, tuple[Replay, torch.Tensor] | None] = {}

    def __call__(self, batch: InputBatch, adapted: bool = False) -> torch.Tensor:
        """Run the forward pass as `eager` does. The result is valid until the next call."""
        self._num_steps += 1
        num_reqs = len(batch.step.rows)
        if batch.max_query_len > 1 and self.mixed is not None and not adapted:
            hidden = self.mixed(batch)
            if hidden is not None:
                return hidden
        if not self._may_replay(batch) or (adapted and not self.adapters.fit_slots):
            return self.eager(batch, adapted)
        size = self.sizes[bisect_left(self.sizes, num_reqs)], adapted
        graph = self._graphs.get(size)
        if graph is None:
            hidden = self.eager(batch, adapted)
            if size not in self._graphs and self._worth_recording(size):
                self._record_padding(size)
            return hidden
        replay, hidden = graph
        if adapted:
            self.adapters.fill_slots(size[0])
        replay()
        return hidden[:num_reqs]

    def _may_replay(self, batch: InputBatch) -> bool:
        """Return whether a recording of steps with one token per request can compute this one, apart from adapters."""
        whole = batch.needed_rows is None and batch.is_recordable
        return whole and batch.max_query_len == 1 and len(batch.step.rows) <= self.sizes[-1]

    def num_rows(self, batch: InputBatch) -> int:
        """Return the number of tokens that the recording for a step without adapters computes, 0 if it runs eagerly."""
        if batch.max_query_len > 1:
            return self.mixed.size_of(len(batch.input_ids)) if self.mixed is not None and batch.is_recordable else 0
        size = self.sizes[bisect_left(self.sizes, len(batch.step.rows))] if self._may_replay(batch) else 0
        return size if self._graphs.get((size, False)) else 0

    def padded_size(self, step: StepInput) -> int:
        """Return the number of requests to which the buffers must be padded for `step`; 0 if no graph applies."""
        num_reqs = len(step.rows)
        if max(step.num_scheduled) > 1:
            return self.mixed.padded_size(step) if self.mixed is not None else 0
        if num_reqs > self.sizes[-1]:
            return 0
        return self.sizes[bisect_left(self.sizes, num_reqs)]

    def record_next(self) -> bool:
        """Record the largest size not recorded yet. Returns whether more are left.

        Call it only while no step runs, because it changes the buffers.
        """
        missing = [size for size in self.recordings if size not in self._graphs]
        if missing:
            of_kind = [size for size in missing if size[1] == missing[0][1]]
            self._record_padding(of_kind[-1])
            return len(missing) > 1 or self.mixed is not None
        return self.mixed is not None and self.mixed.record_next()

    def _record_padding(self, size: Size) -> None:
        """Record `size` over padding alone: the run before the capture would otherwise advance the caches and states of
        requests a second time. Changes the buffers, which the previous step no longer needs.
        """
        self._tensors_of_size(size[0]).pad(0)
        self._graphs[size] = self._try_to_record(size)

    def _worth_recording(self, size: Size) -> bool:
        """Return whether to record `size` now, although requests wait meanwhile."""
        self._seen[size] += 1
        if self._seen[size] < _SEEN_OFTEN or self._num_steps < self._may_record_at:
            return False
        self._may_record_at = self._num_steps + _STEPS_BETWEEN
        return True

    def _tensors_of_size(self, size: int) -> StepTensors:
        return self.buffers.views_for_step(size, size, self.buffers.block_tables.shape[2])

    def _try_to_record(self, size: Size) -> tuple[Replay, torch.Tensor] | None:
        """Record a size, or return None if that fails: memory ran out, or an operation cannot be captured.

        Raises RuntimeError if there are several ranks.
        """
        try:
            return self._record(size)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if tp().size > 1:  # the other ranks wait for this one, without an error of their own
                raise RuntimeError(f"no CUDA graph for {size[0]} requests on rank {tp().rank}") from error
            logger.warning(
                "no CUDA graph for %d requests%s, running these steps eagerly: %s: %s",
                size[0],
                " with adapters" if size[1] else "",
                type(error).__name__,
                error,
            )
            return None

    def _record(self, recording: Size) -> tuple[Replay, torch.Tensor]:
        buffers, outputs, (size, adapted_rows) = self.buffers, [], recording
        # The block table has the width of the longest context, and the lengths are upper bounds, because both change
        # between replays.
        attn = self._tensors_of_size(size).metadata(self.backend, max_query_len=1, max_seq_len=self.max_model_len)

        def run() -> None:
            adapted = self.adapt(attn)
            for meta in adapted:
                meta.backend.build(meta)
            outputs.append(self.forward(buffers.input_ids[:size], buffers.positions[:size], adapted))

        with self.adapters.recording(size) if adapted_rows else nullcontext():
            replay = self.record(run)
        return replay, outputs[-1]


class CudaRecorder:
    """Captures with torch, on its own stream, after one run there that lets kernels compile and libraries allocate
    their workspaces.

    The capture mode is "thread_local": meanwhile other threads wait for events (the engine for a step's result, NCCL's
    watchdog), which the stricter mode forbids. `torch.cuda.graph` is not used, because it waits for the device and
    returns all unused memory to it, which the next steps would have to allocate again.
    """

    def __init__(self) -> None:
        self._pool, self._stream = None, torch.cuda.Stream()

    def __call__(self, function: Callable[[], None]) -> Replay:
        (replay,) = self.pieces(lambda cut: function())
        return replay

    def pieces(self, function: Callable[[Callable[[], None]], None]) -> list[Replay]:
        """Record a function in pieces: where it calls its argument, a piece ends and the next begins."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            with torch.cuda.stream(self._stream):
                function(lambda: None)
            current.wait_stream(self._stream)
            with torch.cuda.stream(self._stream):
                self._begin(graphs)
                try:
                    function(lambda: self._cut(graphs))
                finally:
                    graphs[-1].capture_end()
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its own stream current
        self._pool = self._pool or graphs[-1].pool()
        for graph in graphs:  # the first replay uploads the graph to the device
            graph.replay()
        return [graph.replay for graph in graphs]

    def _begin(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        graphs.append(graph)

    def _cut(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs[-1].capture_end()
        self._pool = self._pool or graphs[-1].pool()
        self._begin(graphs)
