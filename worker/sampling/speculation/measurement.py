"""Measures the times of steps by their number of tokens, one step at a time while no request runs.

They are CPU time of all threads: what else the machine does would make a single step several times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from quire.worker.sampling.speculation.costs import KNOTS, StepCosts

_SIZES = [int(size) for size in KNOTS if size <= 64]
_ENOUGH, _NEEDED = 2.0, 8  # seconds after which no more sizes are measured than up to this one
_FAST = 0.1  # seconds of a step below which the better of two counts


class Measurement:
    """Steps of m requests with one token each, in rows that the next requests overwrite. Their keys and values go to
    the null block, their states to `page`.
    """

    def __init__(
        self, execute: Callable[[StepInput], None], costs: StepCosts, table: RequestTable, most: int, page: int = 0
    ) -> None:
        """A step has at most `most` tokens."""
        self.execute, self.costs, self.table = execute, costs, table
        self.blocks = [[0, page] if group.kind == "state" else [0] for group in table.groups]
        self.sizes = [size for size in _SIZES if size <= most]
        self.seconds: dict[int, float] = {}
        self.spent = 0.0

    def go_on(self) -> bool:
        """Measure one size. Returns whether more are left."""
        if not self.sizes:
            return False
        if not self.seconds:
            self._time(1)  # the first step touches all weights
        size = self.sizes.pop(0)
        seconds = self._time(size)
        self.seconds[size] = min(seconds, self._time(size)) if seconds < _FAST else seconds
        self.spent += seconds
        if self.spent > _ENOUGH and size >= _NEEDED:
            self.sizes = []
        if not self.sizes:
            self.costs.measured(self.seconds)
        return bool(self.sizes)

    def _time(self, size: int) -> float:
        sampling, rows = SamplingParams(speculation=False, ignore_eos=True), list(range(size))
        new = [NewRequest(row, [0], 1, [list(ids) for ids in self.blocks], sampling) for row in rows]
        step = StepInput(0, new, rows, [0] * size, [1] * size, [[] for _ in rows], rows)
        begin = time.process_time()
        self.execute(step)
        return time.process_time() - begin
