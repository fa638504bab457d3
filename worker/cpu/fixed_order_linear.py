"""Linear layers in which a row's result has the same bits in any batch, for `--deterministic`.

The order in which a native product sums over k may depend on the number of rows. Bfloat16 weights: with AMX it does
not; without AMX many rows are multiplied in fixed point, few as floats. Quantized weights: with AMX up to 32 rows are
multiplied as integers, more in bfloat16. These layers use floats (quantized weights: integers) for any number of rows.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.cpu.native import LinearArgs
from quire.worker.cpu.native_linear import MixedLinear, PackedLinear, QuantizedLinear
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.cpu.states import float_linear
from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.linear import Linear, RowProduct
from quire.worker.layers.quantization.int_groups import Reordered
from quire.worker.transformer.mla import MLAttention

_INTEGERS = 2  # `path` of QuantizedLinear
_ONE_WAY = 3  # `path` of PackedLinear


class FixedRows:
    """Calls `linear` with the same algorithm for any number of rows."""

    def __init__(self, linear: PackedLinear | QuantizedLinear | MixedLinear):
        self.linear, self.path = linear, _ONE_WAY if isinstance(linear, PackedLinear) else _INTEGERS

    def __call__(
        self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, workspace: Workspace | None = None
    ) -> torch.Tensor:
        return self.linear(x, dtype, self.path, workspace)

    def halves(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gate and up before the activation."""
        return self.linear.halves(x, self.path)

    def args(self) -> LinearArgs:
        """Return the C struct of the layer, which must outlive the struct."""
        return self.linear.args(self.path)


class FixedFloats:
    """The product with a weight `[N, K]` in float32, whatever its type: for small weights that no kernel packs."""

    def __init__(self, weight: torch.Tensor):
        self.size = len(weight)
        columns = -(-self.size // 16) * 16  # for vectors of floats
        self.weight, self.bias = torch.zeros(weight.shape[1], columns), torch.zeros(columns)
        self.weight[:, : self.size] = weight.t()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply x `[T, K]` by `weight`, the one that this was made for. Returns float32."""
        return float_linear(x.float(), self.weight, self.bias)[:, : self.size]


class FixedHeads:
    """See `mla.multiply_heads`."""

    def __init__(self, weights: torch.Tensor):
        self.heads = [FixedFloats(weight) for weight in weights]

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = [head(part, weight) for head, part, weight in zip(self.heads, x.unbind(1), weights)]
        return torch.stack(parts, 1).to(x.dtype)


def fix_order(model: nn.Module) -> None:
    """Make the rows of each linear layer of `model` independent of each other. Weights must be loaded and packed."""
    for layer in model.modules():
        if isinstance(layer, RowProduct):
            layer.multiply = FixedFloats(layer.weight)
        elif isinstance(layer, MLAttention):
            w_k, w_v = layer.attn.matrices(layer.kv_b_proj.weight)
            layer.attn.to_latents, layer.attn.to_values = FixedHeads(w_k.transpose(1, 2)), FixedHeads(w_v)
        elif isinstance(layer, Linear) and not layer.method.fixed_order:
            method = layer.method.method if isinstance(layer.method, Reordered) else layer.method
            assert isinstance(method, (PackedMethod, NativeQuantMethod)), "not packed for the native kernels"
            method.linear = FixedRows(method.linear)
