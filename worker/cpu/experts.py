"""Run all experts of a mixture-of-experts layer in one native call (csrc/experts.cpp), which reads only the weights of
experts that have tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref

import torch

from quire.worker.cpu.lora import PackedLora, rows_args
from quire.worker.cpu.native import KERNELS, ExpertsArgs, LinearArgs, LoraMatricesArgs, LoraRowsArgs, QuantArgs
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.layers.linear import Linear
from quire.worker.layers.lora import Adapted, LoraRows
from quire.worker.layers.moe_lora import ExpertsLora


class NativeExperts:
    """Experts `first`, `first` + 1 ... whose weights are packed. Create it with `of`.

    It holds addresses: create it again when weights change.
    """

    def __init__(
        self,
        gate_up: list[LinearArgs],
        down: list[LinearArgs],
        first: int,
        weigh_inputs: bool,
        squares: bool,
    ):
        self._layers = (LinearArgs * len(gate_up))(*gate_up), (LinearArgs * len(down))(*down)
        self._first, self._weigh_inputs, self._squares = first, weigh_inputs, squares
        self._half = gate_up[0].n // 2  # columns of the gate
        # by adapter: its layers and weights, its matrices for both products of each expert, and their owners
        self._tables: dict[str, tuple[Adapted, Array, Array, list[PackedLora]]] = {}

    @classmethod
    def from_layers(
        cls, gate_up: Sequence[Linear], down: Sequence[Linear], first: int, weigh_inputs: bool, squares: bool = False
    ) -> NativeExperts | None:
        """Return the experts, or None if a weight is not packed or weights are of several kinds, e.g. of gate and up,
        or one that the checkpoint leaves plain: a call multiplies weights of one kind. With `squares` there is no gate,
        and relu(up)^2 is between the products.
        """
        if not all(isinstance(layer.method, (PackedMethod, NativeQuantMethod)) for layer in (*gate_up, *down)):
            return None
        args = [[layer.method.args() for layer in layers] for layers in (gate_up, down)]
        uniform = None not in args[0] and all(len({_kind(one) for one in layers}) == 1 for layers in args)
        return cls(*args, first, weigh_inputs, squares) if uniform else None

    def args(self, top_k: int) -> ExpertsArgs:
        """Return the C struct for `top_k` experts per token; this object must outlive it."""
        return ExpertsArgs(*self._layers, self._first, len(self._layers[0]), top_k, self._weigh_inputs, self._squares)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the same as `layers.moe.run_experts`."""
        return self._run(x, weights, ids, None, None, 0)

    def run_adapted(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, groups: Sequence[LoraRows], lora: ExpertsLora
    ) -> torch.Tensor:
        """Return the same plus the products of the adapters of `groups` for their rows. The sums of other rows do not
        change.
        """
        tables = [self._table(rows.key, lora) for rows in groups]
        both = ((LoraRowsArgs * len(groups))(*map(rows_args, groups, of)) for of in zip(*tables))
        return self._run(x, weights, ids, *both, len(groups))

    def _table(self, key: str, lora: ExpertsLora) -> tuple[int, int]:
        """Return addresses of an adapter's matrices for the first and second product of each expert."""
        active = lora.step.active
        known = self._tables.get(key)
        if known is None or known[0] is not active[key]:
            self._tables = {one: table for one, table in self._tables.items() if one in active}
            known = self._tables[key] = self._build(key, active[key], lora)
        return addressof(known[1]), addressof(known[2])

    def _build(self, key: str, adapted: Adapted, lora: ExpertsLora) -> tuple[Adapted, Array, Array, list[PackedLora]]:
        tables, owners = [], []
        for products, half in ((lora.gate_up, self._half), (lora.down, None)):
            tables.append((LoraMatricesArgs * len(products))())
            for i, product in enumerate(products.values()):
                if (weights := product.lora.weights.get(key)) is not None:
                    owners.append(PackedLora.from_weights(weights))
                    tables[-1][i] = owners[-1].args(half)
        return adapted, *tables, owners

    def _run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: Array | None,
        down: Array | None,
        num_adapters: int,
    ) -> torch.Tensor:
        x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.contiguous()
        assert x.dtype == torch.bfloat16 and ids.dtype == torch.int64
        out = torch.empty_like(x)
        KERNELS.lib.quire_run_adapted_experts(
            byref(self.args(ids.shape[1])),
            x.data_ptr(),
            x.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            len(x),
            gate_up,
            down,
            num_adapters,
        )
        return out


def _kind(layer: LinearArgs) -> tuple[int, int] | None:
    """Return (kind, group) of a quantized weight."""
    if layer.quant is None:
        return None
    quant = QuantArgs.from_address(layer.quant)
    return quant.kind, quant.group
