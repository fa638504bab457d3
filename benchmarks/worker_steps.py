"""Steps of a worker in this process, without engine and HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count as counter

import msgspec

from quire.configs.config import Config
from quire.worker.messages import LoraUse, NewRequest, SamplingParams, StepInput
from quire.worker.startup.preview import preview
from quire.worker.worker import Worker

BLOCK = 16
_steps = counter(1)


class Rows:
    """Requests in rows from `first` on. The first step admits them.

    A row has a prompt of `prompt` tokens, of which the KV cache has `computed`, and room for `room` tokens more. Its
    blocks begin at `first_block`: rows of other objects share them by default.
    """

    def __init__(
        self,
        worker: Worker,
        first: int,
        number: int,
        prompt: int,
        computed: int = 0,
        *,
        room: int = 0,
        first_block: int = 1,
        sampling: SamplingParams,
        adapters: Sequence[LoraUse] = (),
    ):
        self.worker, self.rows, self.computed = worker, range(first, first + number), computed
        self.prompt, self.sampling, self.adapters = prompt, sampling, adapters
        self.num_blocks, self.first_block = -(-(prompt + room) // BLOCK), first_block
        self.new = [self._new(i, row) for i, row in enumerate(self.rows)]

    def run(self, count: int, clock: Callable[[], float] = time.perf_counter, *, advance: bool = False) -> float:
        """Return the seconds of a step of `count` tokens for each row. `advance`: the next step continues after it."""
        number, new, self.new = len(self.rows), self.new, []
        step = StepInput(
            next(_steps), new, [*self.rows], [self.computed] * number, [count] * number,
            [[] for _ in self.rows], [*range(number)],
        )  # fmt: skip
        self.computed += count * advance
        start = clock()
        output = self.worker.execute(step).result()
        seconds = clock() - start
        assert output.errors is None, output.errors
        return seconds

    def _new(self, i: int, row: int) -> NewRequest:
        table, ids = self.worker.runner.table, []
        for g, group in enumerate(table.groups):
            first = self.first_block + (i * len(table.groups) + g) * self.num_blocks
            is_state = group.kind == "state"  # a page that is read and written
            ids.append([table.first_state + 1 + row] * 2 if is_state else [*range(first, first + self.num_blocks)])
        prompt = [100 + (row * 37 + k) % 1000 for k in range(self.prompt)]
        chosen = [self.adapters[i % len(self.adapters)]] if self.adapters else []
        sampling = msgspec.structs.replace(self.sampling, seed=row)
        return NewRequest(row, prompt, self.prompt, ids, sampling, adapters=chosen)


def num_groups(**flags: object) -> int:
    """Return the number of cache groups of the model with `flags`."""
    return len(preview(Config.from_flat(**flags, max_model_len="auto")).groups)


def start_worker(**flags: object) -> Worker:
    """Return a worker that has its fastest kernels."""
    worker = Worker(Config.from_flat(**flags, block_size=BLOCK))
    worker.initialize(lambda phase, fraction: None)
    while worker.look_for_ops():
        time.sleep(0.5)
    return worker
