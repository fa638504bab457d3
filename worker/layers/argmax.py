"""argmax of an output head in plain torch that reads 8 bits of most weights.

A copy of the weight in 8 bits gives bounds of all logits, which rule out nearly all outputs. The others' logits are
computed. It takes half the time of a product with bfloat16, or a tenth where that has many rows and the CPU has no
instructions for it; the product is a third of a step of a small model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.worker.host import resources as host
from quire.worker.layers.onednn import multiplies

_MIN_WEIGHTS = 1 << 24  # a smaller weight is in the caches
_FIRST_CALLS = 16  # rows of heads whose native kernels come soon are not worth the copy
_SPARE = 0.5  # share of the machine's memory that the copy leaves available
_PIECE = 1 << 22  # weights rounded at once
_MOST = 1 / 8  # share of outputs to compute, above which the screen pauses for `_PAUSE` calls
_PAUSE = 64


def _most_rows() -> int:
    """Return the number of rows up to which the products in 8 bits take less time than those that they save."""
    return 1 if multiplies(torch.bfloat16) else 32


class ArgmaxScreen:
    """Finds the largest of the products of each of a few rows with `weight` `[n, k]`. `multiply` is the product that
    logits are defined by.
    """

    def __init__(self, weight: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.weight, self.multiply = weight, multiply
        self.is_fast = (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and weight.numel() >= _MIN_WEIGHTS
            and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        )
        self.codes: torch.Tensor | None = None  # int8 [n, k]; times `scales` [n] bfloat16, the rounded weight
        self._wait = _FIRST_CALLS  # calls for which all logits are computed

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the first index of the largest logit of each row of x `[S, k]`, int64 `[S]`, or None if the caller
        should compute all logits.
        """
        if not self.is_fast or not 0 < len(x) <= _most_rows() or x.dtype != torch.bfloat16:
            return None
        if self._wait > 0:
            self._wait -= 1
            return None
        if self.codes is None:
            total, available = host.memory()
            if available - self.weight.numel() < _SPARE * total:
                self.is_fast = False
                return None
            self._round()
        ids = self._candidates(x)
        if not 0 < len(ids) <= _MOST * len(self.weight):
            self._wait = _PAUSE
            return None
        return ids[self.multiply(x, self.weight[ids]).argmax(-1)]

    def _round(self) -> None:
        """Make the 8-bit copy, and bounds of the distance of each of its rows from the weight's."""
        rows = len(self.weight)
        self.codes = torch.empty(self.weight.shape, dtype=torch.int8)
        self.scales, self.away = torch.empty(rows, dtype=torch.bfloat16), torch.empty(rows)
        step = max(1, _PIECE // self.weight.shape[1])
        for i in range(0, rows, step):
            part = slice(i, i + step)
            exact = self.weight[part].float()
            self.scales[part] = exact.abs().amax(1).clamp(min=1e-30) / 127
            scales = self.scales[part].float()[:, None]
            rounded = (exact / scales).round_().clamp_(-127, 127)
            self.codes[part] = rounded
            # and for the rounding of sums in float32
            self.away[part] = (exact - rounded * scales).norm(dim=1) + 1e-4 * exact.norm(dim=1)

    def _candidates(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[c]`, in order, among which are those with the largest logit of each row; none if a row
        has none, because an entry is not finite.
        """
        near = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scales).float()
        # both this product and the logit are rounded to bfloat16
        slack = near.abs().mul_(2**-7).addcmul_(x.float().norm(dim=1, keepdim=True), self.away)
        possible = near + slack >= (near - slack).amax(1, keepdim=True)
        if len(x) > 1:
            possible = possible.any(0) & possible.any(1).all()
        return possible.view(-1).nonzero()[:, 0]
