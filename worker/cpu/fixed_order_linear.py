"""Linear layers whose rows have the same bits whatever rows are beside them. For `--deterministic`.

How a native product adds up over k may depend on how many rows there are: with AMX it does not; without it many rows
are multiplied as fixed-point numbers, few as floats; quantized weights are, with AMX, multiplied as integers up to 32
rows and in bfloat16 beyond. So floats, and of quantized weights integers, are used for any number of rows.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.cpu.native import LinearArgs
from quire.worker.cpu.ops import PackedLinear, QuantizedLinear
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.layers.linear import Linear
from quire.worker.platforms.huge_pages import Workspace

_INTEGERS = 2  # `path` of QuantizedLinear
_ONE_WAY = 3  # `path` of PackedLinear


class FixedRows:
    """Calls `linear` so that each row takes the same way through it."""

    def __init__(self, linear: PackedLinear | QuantizedLinear):
        self.linear, self.path = linear, _INTEGERS if isinstance(linear, QuantizedLinear) else _ONE_WAY

    def __call__(
        self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, workspace: Workspace | None = None
    ) -> torch.Tensor:
        return self.linear(x, dtype, self.path, workspace)

    def args(self) -> LinearArgs:
        """The layer as native code takes it."""
        return self.linear.args(self.path)


def fix_order(model: nn.Module) -> None:
    """Make every linear layer of `model`, whose weights are loaded and packed, independent of the number of rows."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            assert isinstance(layer.method, (PackedMethod, NativeQuantMethod)), "not packed for the native kernels"
            layer.method.linear = FixedRows(layer.method.linear)
