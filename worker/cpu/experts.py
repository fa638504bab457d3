"""Runs all experts of a mixture-of-experts layer in one native call (csrc/experts.cpp), which reads the weights of the
experts that have tokens, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch

from quire.worker.cpu.native import KERNELS, ExpertsArgs, LinearArgs, QuantArgs
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.layers.linear import Linear


class NativeExperts:
    """Experts `first`, `first` + 1 ... whose weights are packed. Create it with `of`.

    It holds addresses: create it again when weights change.
    """

    def __init__(
        self, gate_up: list[LinearArgs], down: list[LinearArgs], first: int, weigh_inputs: bool, squares: bool
    ):
        self._layers = (LinearArgs * len(gate_up))(*gate_up), (LinearArgs * len(down))(*down)
        self._first, self._weigh_inputs, self._squares = first, weigh_inputs, squares

    @classmethod
    def of(
        cls, gate_up: Sequence[Linear], down: Sequence[Linear], first: int, weigh_inputs: bool, squares: bool = False
    ) -> NativeExperts | None:
        """The experts, or None if a weight is not packed, or if they are of several kinds, e.g. a gate and up, or one
        that the checkpoint leaves plain: a call multiplies weights of one kind. With `squares` there is no gate, and
        relu(up)^2 is between the products.
        """
        if not all(isinstance(layer.method, (PackedMethod, NativeQuantMethod)) for layer in (*gate_up, *down)):
            return None
        args = [[layer.method.args() for layer in layers] for layers in (gate_up, down)]
        uniform = None not in args[0] and all(len({_kind(one) for one in layers}) == 1 for layers in args)
        return cls(*args, first, weigh_inputs, squares) if uniform else None

    def args(self, top_k: int) -> ExpertsArgs:
        """The C struct for `top_k` experts per token; this object must outlive it."""
        return ExpertsArgs(*self._layers, self._first, len(self._layers[0]), top_k, self._weigh_inputs, self._squares)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same as `layers.moe.run_experts`."""
        x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.contiguous()
        assert x.dtype == torch.bfloat16 and ids.dtype == torch.int64
        out = torch.empty_like(x)
        KERNELS.lib.quire_run_experts(
            byref(self.args(ids.shape[1])),
            x.data_ptr(),
            x.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            len(x),
        )
        return out


def _kind(layer: LinearArgs) -> tuple[int, int] | None:
    """(kind, group) of a quantized weight."""
    if layer.quant is None:
        return None
    quant = QuantArgs.from_address(layer.quant)
    return quant.kind, quant.group
