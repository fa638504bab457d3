"""Measure the times of steps by their number of tokens, one step at a time while no request runs.

On a CPU they are CPU time of all threads: other load on the machine could make a single step several times as long.
There, a step of m requests takes as long as one that verifies m - 1 drafts of one request. On a GPU the former replays
one CUDA graph and the latter does not, so that both are measured, in wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from quire.worker.sampling.speculation.costs import KNOTS, StepCosts

_SIZES = [int(size) for size in KNOTS if size <= 64]
_ENOUGH, _NEEDED = 2.0, 8  # after _ENOUGH seconds, only sizes up to _NEEDED are measured
_FAST = 0.1  # seconds; of a shorter step, the better of two runs counts


class Measurement:
    """Steps in rows that the next requests overwrite. Their keys and values go to the null block, their states to
    `page`.
    """

    def __init__(
        self,
        execute: Callable[[StepInput], None],
        costs: StepCosts,
        table: RequestTable,
        most: int,
        page: int = 0,
        apart: bool = False,
    ) -> None:
        """Measure steps of at most `most` tokens. `apart`: also measure steps of one request, all in wall time."""
        self.execute, self.costs, self.table, self.page, self.apart = execute, costs, table, page, apart
        self.sizes = [size for size in _SIZES if size <= most]
        self.seconds: dict[int, float] = {}  # by tokens, of one request each
        self.of_one: dict[int, float] = {}  # by tokens of one request
        self.spent = 0.0

    def measure_next(self) -> bool:
        """Measure one size. Returns whether more are left."""
        if not self.sizes:
            return False
        if not self.seconds:
            self._time(1, 1)  # the first step touches all weights
        size = self.sizes.pop(0)
        self.seconds[size] = self._better(size, 1)
        self.of_one[size] = self._better(1, size) if self.apart else self.seconds[size]
        self.spent += self.seconds[size]
        if self.spent > _ENOUGH and size >= _NEEDED:
            self.sizes = []
        if not self.sizes:
            self.costs.measured(self.of_one, self.seconds)
        return bool(self.sizes)

    def _better(self, num_reqs: int, num_tokens: int) -> float:
        seconds = self._time(num_reqs, num_tokens)
        return min(seconds, self._time(num_reqs, num_tokens)) if seconds < _FAST else seconds

    def _time(self, num_reqs: int, num_tokens: int) -> float:
        """Return the seconds of a step of `num_reqs` requests with `num_tokens` tokens each."""
        sampling, rows = SamplingParams(speculation=False, ignore_eos=True), list(range(num_reqs))
        blocks = [0] * -(-num_tokens // self.table.block_size)
        by_group = [[0, self.page] if group.kind == "state" else blocks for group in self.table.groups]
        ids = [0] * num_tokens
        new = [NewRequest(row, ids, num_tokens, [list(one) for one in by_group], sampling) for row in rows]
        step = StepInput(0, new, rows, [0] * num_reqs, [num_tokens] * num_reqs, [[] for _ in rows], rows)
        clock = time.perf_counter if self.apart else time.process_time
        begin = clock()
        self.execute(step)
        return clock() - begin
