"""Counts what a step with prompts launches outside its recorded pieces, and measures what it takes the host, without a
GPU: an engine on the stand-ins of `launches.py`, whose kernels do nothing.

python -m tests.helpers.worker.piece_launches      prints a table of some families
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
from quire.engine.messages import SamplingParams
from quire.worker import model_runner
from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.mixed_graphs import MixedGraphs
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import build_family
from tests.helpers.worker.emulated_gpu import EmulatedGpu, emulated
from tests.helpers.worker.launches import Launches, Platform, interpreter

SETTINGS = dict(
    block_size=4, num_gpu_blocks_override=160, max_num_batched_tokens=64, max_num_seqs=8, max_model_len="200"
)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class _Gpu(Platform, EmulatedGpu):
    """A device that records its steps."""

    has_graphs = overlaps = True


@dataclass
class Pieces:
    """Records by running once; a replayed piece is one launch."""

    launches: Launches
    inside: list[Counter] = field(default_factory=list)  # of each piece of the last recording

    def __call__(self, function):
        function()
        return function

    def pieces(self, function):
        self.inside = []

        def cut() -> None:
            self.inside.append(self.launches.outside.copy())
            self.launches.outside.clear()

        self.launches.outside.clear()
        function(cut)
        cut()
        return [lambda: self.launches.add("graph")] * len(self.inside)


@dataclass
class Forward:
    """`MixedGraphs` whose calls are counted."""

    mixed: MixedGraphs
    launches: Launches
    outside: Counter = field(default_factory=Counter)  # of the last call
    batch: InputBatch | None = None

    def __getattr__(self, name):
        return getattr(self.mixed, name)

    def __call__(self, batch):
        self.batch = batch
        self.launches.outside.clear()
        hidden = self.mixed(batch)
        self.outside = self.launches.outside.copy()
        return hidden


@contextlib.contextmanager
def replayed(name: str, num_tokens: int = 21) -> Iterator[tuple[Forward, list[Counter]]]:
    """(the forward passes of an engine that has replayed prompts by a family's tiny model, launches of each piece)."""
    launches = Launches()
    recorder = Pieces(launches)
    patch = mock.patch.object(model_runner, "CudaRecorder", lambda: recorder)
    with tempfile.TemporaryDirectory() as folder, launches.counting(), emulated(_Gpu(launches)), patch:
        folder = build_family(name, Path(folder))
        engine = InProcessEngine(folder, attention_backend="triton_paged", **SETTINGS)
        runner = engine.executor._worker.runner
        while runner.work_idle():
            pass
        forward = runner.forward.mixed = Forward(runner.forward.mixed, launches)
        for first in (5, 6):
            engine.generate([[first + i for i in range(num_tokens)]], [GREEDY])
        yield forward, recorder.inside
        engine.close()


def host_microseconds(name: str, rounds: int = 100) -> float:
    """The least CPU time of our code for an operation between two pieces, with its piece."""
    with replayed(name) as (forward, inside):
        batch, mixed = forward.batch, forward.mixed
    recorded, seconds = mixed._recorded[mixed.size_of(len(batch.input_ids))], []
    nothing = mock.patch.object(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)
    with nothing, torch.inference_mode():
        for _ in range(rounds):
            begin = time.thread_time()
            mixed._replay(recorded, batch.attn, len(batch.input_ids))
            seconds.append(time.thread_time() - begin)
    return min(seconds) / len(inside) * 1e6


if __name__ == "__main__":
    for name in ("arcee", "gemma2", "kimi_k2", "llama4", "qwen3_next", "granite4-mamba", "jamba", "lfm2"):
        with replayed(name) as (forward, inside):
            outside, each = forward.outside, [piece.total() for piece in inside]
        host = host_microseconds(name)
        print(f"{name}: {outside.total()} outside {len(each)} pieces of {each}; {host:.0f} us each")
        print("   ", dict(outside))
