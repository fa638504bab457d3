"""Linear methods that use the native CPU kernels, whose weights are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.worker.cpu.lora import run_adapted
from quire.worker.cpu.native import LinearArgs
from quire.worker.cpu.native_linear import MixedLinear, PackedLinear, QuantizedLinear
from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.lora import Group


class PackedMethod(LinearMethod):
    """Packs a layer's weight: after construction the layer holds `packed_weight` instead of `weight`."""

    def __init__(self, layer: Linear):
        self.linear = PackedLinear(layer.weight, layer.bias, layer.gated)
        layer.weight = None
        layer.register_buffer("packed_weight", self.linear.packed, persistent=False)
        self.rows = self.linear.rows  # rows of the original weight, for a tied embedding

    def args(self) -> LinearArgs:
        """Return the C struct of the layer, which must outlive the struct."""
        return self.linear.args()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        return self.linear(x, torch.float32, workspace=workspace)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def apply_halves(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear.halves(x)

    def apply_adapted(self, layer: Linear, x: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        return run_adapted(layer, x, groups)


class NativeQuantMethod(LinearMethod):
    """Multiplies by weights of 2 to 8 bits with the native kernels. The layer's buffers hold the packed weights."""

    def __init__(self, layer: Linear, linear: QuantizedLinear | MixedLinear):
        self.linear, self.parts = linear, linear.parts
        # a gate and up of different kinds are not interleaved
        self.activates = not (layer.gated and isinstance(linear, MixedLinear))
        for i, part in enumerate(self.parts):
            suffix = f"_{i}" if i else ""  # the first replaces the plain method's buffer
            layer.register_buffer(f"quantized{suffix}", part.packed, persistent=False)
            layer.register_buffer(f"scales{suffix}", part.scales, persistent=False)
            if part.offsets is not None:
                layer.register_buffer(f"offsets{suffix}", part.offsets, persistent=False)

    def args(self) -> LinearArgs | None:
        """Return the C struct of the layer, which must outlive the struct; None if its activation is applied apart."""
        return self.linear.args() if self.activates else None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the weight, for a tied embedding."""
        (part,) = self.parts
        return part.rows(ids)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        return self.linear(x, torch.float32, workspace=workspace)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if self.activates:
            return self.linear(x)
        return layer.activate(self.linear(x, torch.float32)).to(x.dtype)

    def apply_halves(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear.halves(x) if self.activates else self.linear(x, torch.float32)
