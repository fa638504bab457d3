"""Linear layers whose rows have the same bits whatever rows are beside them. For `--deterministic`.

How a native product adds up over k may depend on how many rows there are: with AMX it does not; with AVX2 many rows are multiplied as fixed-point numbers, few as floats; with
AVX-512 alone 8 rows at a time are summed one way, fewer in others; quantized weights are, with AMX, multiplied as integers up to 32 rows and in bfloat16 beyond. So with AVX2
floats are used for any number of rows, with AVX-512 alone rows are padded to whole eights, and of quantized weights integers are used for any number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from worker.huge_pages import Workspace
from worker.kernels import cpu_ops
from worker.kernels.cpu_ops import PackedLinear, QuantizedLinear
from worker.kernels.native import LinearArgs
from worker.layers.linear import Linear
from worker.layers.packed import PackedMethod
from worker.layers.quant import NativeQuantMethod

_ROWS = 8
_INTEGERS = 2  # `path` of QuantizedLinear
_ONE_WAY = 3  # `path` of PackedLinear


class FixedRows:
    """Calls `linear` so that each row takes the same way through it."""

    def __init__(self, linear: PackedLinear | QuantizedLinear):
        self.linear = linear

    def __call__(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, workspace: Workspace | None = None) -> torch.Tensor:
        if isinstance(self.linear, QuantizedLinear):
            return self.linear(x, dtype, _INTEGERS, workspace)
        missing = 0 if cpu_ops.rows_are_independent() else -len(x) % _ROWS
        return self.linear(F.pad(x, (0, 0, 0, missing)) if missing else x, dtype, _ONE_WAY, workspace)[: len(x)]

    def args(self) -> LinearArgs | None:
        """The layer as native code takes it; None where it cannot take it, for the rows would have to be padded."""
        if isinstance(self.linear, QuantizedLinear):
            return self.linear.args(_INTEGERS)
        return self.linear.args(_ONE_WAY) if cpu_ops.rows_are_independent() else None


def fix_order(model: nn.Module) -> None:
    """Make every linear layer of `model`, whose weights are loaded and packed, independent of the number of rows."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            assert isinstance(layer.method, (PackedMethod, NativeQuantMethod)), "not packed for the native kernels"
            layer.method.linear = FixedRows(layer.method.linear)
