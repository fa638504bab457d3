"""The experts of a mixture-of-experts layer: many small MLPs, most of them gated, of which each token uses a few.

Two forms hold them. `StackedExperts` has all of a rank's experts in two tensors, for grouped products on a GPU.
`ListedExperts` has linear layers per expert, so that every format of weights works, and a checkpoint is packed or
quantized expert by expert.

Checkpoints have a tensor per expert and projection, or all experts in one tensor, transposed or not; the loader takes
the form that the files have (`Parameter.other_parts`).

Over tensor-parallel ranks every expert is split along its intermediate size or, with expert parallelism
(`parallel.ep`), every rank has some of the experts. Either way the sum over ranks is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS, FUSED, gated
from quire.worker.layers.layer_ops import LayerOps
from quire.worker.layers.linear import (
    PLAIN,
    Linear,
    LinearMethod,
    MergedColumnParallelLinear,
    Part,
    PlainLinear,
    RowParallelLinear,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.lora import StepLora
from quire.worker.layers.moe_lora import ExpertForm, ExpertsLora, run_mixed
from quire.worker.layers.quantization.mxfp4_experts import GROUP, Mxfp4Expert
from quire.worker.layers.rounding import Rounding
from quire.worker.parallel import Group, ep, split_size, tp, use_groups

if TYPE_CHECKING:
    from quire.worker.spec.moe import MoESpec

Product = Callable[[torch.Tensor], torch.Tensor]


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: dict[int, Product],
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """Return for each row of x `[T, H]` the sum of its experts' outputs times `weights` `[T, k]`; ids are `[T, k]`.

    Experts that are not in `experts` add nothing: they are on other ranks. With `weigh_inputs` the weights multiply the
    experts' inputs instead.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    hit, weights = set(ids.unique().tolist()), weights.float()
    for expert in sorted(hit & experts.keys()):
        tokens, choice = torch.where(ids == expert)
        rows, weight = x[tokens], weights[tokens, choice, None]
        if weigh_inputs:
            out.index_add_(0, tokens, experts[expert]((rows * weight).to(x.dtype)).float())
        else:
            out.index_add_(0, tokens, experts[expert](rows).float() * weight)
    return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class OneExpert:
    """The view of the slice `[1, ...]` of a tensor of all experts, as the parameter of one expert has it: rows `first`,
    `first` + `step` ...
    """

    transposed: bool = False
    first: int = 0
    step: int = 1

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor[0]
        return (tensor.T if self.transposed else tensor)[self.first :: self.step]


@dataclass(frozen=True, slots=True)
class FusedParts:
    """The parts of one expert's parameters in a checkpoint that has all experts in one tensor."""

    moe: MoESpec
    hidden_size: int
    prefix: str  # e.g. "model.layers.0.mlp.experts"
    start: int  # first of the expert's intermediate entries on this rank
    length: int

    def gate_up(self, expert: int, transposed: bool) -> list[Part]:
        num, size, hidden = self.moe.routing.num_experts, self.moe.intermediate_size, self.hidden_size
        shape = (num, hidden, 2 * size) if transposed else (num, 2 * size, hidden)
        return self._gate_up("gate_up_proj", shape, expert, transposed)

    def stacked_parts(self, expert: int) -> tuple[list[Part], list[Part]]:
        """Return the parts of the gate and up, and of the down projection, if each of the three is a tensor of all
        experts.
        """
        num, size, hidden = self.moe.routing.num_experts, self.moe.intermediate_size, self.hidden_size
        names = [f"{self.prefix}.{name}_proj.weight" for name in ("gate", "up", "down")]
        mine, view = (1, self.start, self.length), OneExpert()
        gate_up = [
            Part(name, (num, size, hidden), ((0, expert, 1), mine), ((0, i * self.length, self.length),), view)
            for i, name in enumerate(names[:2])
        ]
        columns = (0, expert, 1), (2, self.start, self.length)
        return gate_up, [Part(names[2], (num, hidden, size), columns, (), view)]

    def gate_up_bias(self, expert: int) -> list[Part]:
        shape = self.moe.routing.num_experts, 2 * self.moe.intermediate_size
        return self._gate_up("gate_up_proj_bias", shape, expert)

    def _gate_up(self, name: str, shape: tuple[int, ...], expert: int, transposed: bool = False) -> list[Part]:
        dim, parts = 2 if transposed else 1, []
        for i in range(2):
            if self.moe.interleaved:
                rows, view = (dim, 2 * self.start, 2 * self.length), OneExpert(transposed, i, 2)
            else:
                rows, view = (dim, i * self.moe.intermediate_size + self.start, self.length), OneExpert(transposed)
            target = ((0, i * self.length, self.length),)
            parts.append(Part(f"{self.prefix}.{name}", shape, ((0, expert, 1), rows), target, view))
        return parts

    def stored(self, linear: Linear, expert: int, of: str) -> list[tuple[nn.Parameter, Part]]:
        """Return the parameters of the tensors that store an expert's quantized projections, "gate_up" or "down", each
        with its part of a tensor of all experts: values and scales that have rows and columns.
        """
        found = []
        for name, parameter in linear.named_parameters(recurse=False):
            parts = getattr(parameter, "parts", ())
            if not name.startswith("stored_") or len(parts) != 1 or len(parts[0].shape) != 2:
                continue
            (part,), side = parts, int(name.split("_")[1])
            ranges = [(0, part.shape[0]), (0, part.shape[1])]
            for dim, start, length in part.source:
                ranges[dim] = start, length
            (start, length), columns = ranges
            rows, view, number = (start, length), OneExpert(), part.shape[0]
            if of == "gate_up" and self.moe.interleaved:
                rows, view, number = (2 * start, 2 * length), OneExpert(False, side, 2), 2 * number
            elif of == "gate_up":
                rows, number = (side * number + start, length), 2 * number
            end = "" if part.name.endswith(".weight") else "_scale_inv"
            shape = self.moe.routing.num_experts, number, part.shape[1]
            source = (0, expert, 1), (1, *rows), (2, *columns)
            found.append(
                (parameter, replace(part, name=f"{self.prefix}.{of}_proj{end}", shape=shape, source=source, view=view))
            )
        return found

    def mxfp4(self, expert: int) -> tuple[list[Part], list[Part], list[Part], list[Part]]:
        """Return the parts of blocks and exponents (`quantization.mxfp4_experts`), of the gate and up and of the down
        projection.
        """
        num, size, hidden = self.moe.routing.num_experts, self.moe.intermediate_size, self.hidden_size
        found = []
        for suffix, block in (("blocks", (GROUP // 2,)), ("scales", ())):
            found.append(self._gate_up(f"gate_up_proj_{suffix}", (num, 2 * size, hidden // GROUP, *block), expert))
        for suffix, block in (("blocks", (GROUP // 2,)), ("scales", ())):
            shape, columns = (num, hidden, size // GROUP, *block), (2, self.start // GROUP, self.length // GROUP)
            name = f"{self.prefix}.down_proj_{suffix}"
            found.append([Part(name, shape, ((0, expert, 1), columns), (), OneExpert())])
        return tuple([replace(part, types=("U8",)) for part in parts] for parts in found)

    def down(self, expert: int, transposed: bool) -> list[Part]:
        num, size, hidden = self.moe.routing.num_experts, self.moe.intermediate_size, self.hidden_size
        shape = (num, size, hidden) if transposed else (num, hidden, size)
        columns = 1 if transposed else 2, self.start, self.length
        return [Part(f"{self.prefix}.down_proj", shape, ((0, expert, 1), columns), (), OneExpert(transposed))]

    def down_bias(self, expert: int) -> list[Part]:
        shape = self.moe.routing.num_experts, self.hidden_size
        return [Part(f"{self.prefix}.down_proj_bias", shape, ((0, expert, 1),), (), OneExpert())]


class ExpertGateUp(MergedColumnParallelLinear):
    """The first half of an expert: `activation(gate) * up`, `[T, in_features] -> [T, out_features / 2]`."""

    def __init__(self, hidden_size: int, moe: MoESpec, prefix: str, method: LinearMethod):
        names = "gate_proj", "up_proj"
        super().__init__(hidden_size, moe.intermediate_size, names, moe.bias, prefix, "moe_intermediate_size", method)
        self.gated = moe.activation if moe.activation in FUSED else None
        self.activate = gated(moe.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply_gated(self, x) if self.gated else self.activate(self.method.apply(self, x))


class Expert(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, this rank's part of a sum over the ranks."""

    def __init__(self, hidden_size: int, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        self.gate_up_proj = ExpertGateUp(hidden_size, moe, prefix, weights.linear(f"{prefix}.gate_up_proj"))
        self.down_proj = _down_proj(hidden_size, moe, prefix, weights)

    def also_fused(self, parts: FusedParts, expert: int) -> None:
        """Let the parameters also be loaded from tensors of all experts."""
        gate_up, down = self.gate_up_proj, self.down_proj
        first, second = parts.stacked_parts(expert)
        if isinstance(gate_up.method, PlainLinear):
            give_other_parts(gate_up.weight, [*(parts.gate_up(expert, t) for t in forms(parts.moe)), first])
        if isinstance(down.method, PlainLinear):
            give_other_parts(down.weight, [*(parts.down(expert, t) for t in forms(parts.moe)), second])
        for layer, of in ((gate_up, "gate_up"), (down, "down")):
            for parameter, part in parts.stored(layer, expert, of):
                give_other_parts(parameter, [[part]])
        if isinstance(gate_up.method, Mxfp4Expert):
            parameters = gate_up.blocks, gate_up.exponents, down.blocks, down.exponents
            for parameter, own in zip(parameters, parts.mxfp4(expert)):
                parameter.parts = own
        if parts.moe.bias:
            give_other_parts(self.gate_up_proj.bias, [parts.gate_up_bias(expert)])
            give_other_parts(self.down_proj.bias, [parts.down_bias(expert)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.method.apply(self.down_proj, self.gate_up_proj(x))


class UngatedExpert(nn.Module):
    """An `Expert` without a gate: down(activation(up(x)))."""

    def __init__(self, hidden_size: int, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        size, method = moe.intermediate_size, weights.linear(f"{prefix}.up_proj")
        self.up_proj = MergedColumnParallelLinear(
            hidden_size, size, ("up_proj",), moe.bias, prefix, "moe_intermediate_size", method
        )
        self.down_proj = _down_proj(hidden_size, moe, prefix, weights)
        self.activation = ACTIVATIONS[moe.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.product(self.activation(self.up_proj(x)))


def _down_proj(hidden_size: int, moe: MoESpec, prefix: str, weights: WeightFormat) -> RowParallelLinear:
    method = weights.linear(f"{prefix}.down_proj")
    return RowParallelLinear(
        moe.intermediate_size, hidden_size, moe.bias, f"{prefix}.down_proj", "moe_intermediate_size", method
    )


def forms(moe: MoESpec) -> tuple[bool, bool]:
    """Return whether tensors of all experts are transposed: first as the family has them, then the other way."""
    return moe.transposed, not moe.transposed


def give_other_parts(parameter: nn.Parameter, others: list[list[Part]]) -> None:
    """Give the parameter other lists of parts that may replace `parts`; the files decide."""
    parameter.other_parts = others


class ListedExperts(nn.Module):
    """This rank's experts as linear layers."""

    def __init__(self, hidden_size: int, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        self.local, self.weigh_inputs, self.biased = local_experts(moe), moe.weigh_inputs, moe.bias
        parts = FusedParts(moe, hidden_size, prefix, *local_slice(moe))
        # with expert parallelism, an expert is not split
        make, self.gated = Expert if moe.gated else UngatedExpert, moe.gated
        with use_groups(tp=Group() if ep().size > 1 else None):
            self.experts = nn.ModuleDict({str(i): make(hidden_size, moe, f"{prefix}.{i}", weights) for i in self.local})
        for i in self.local if moe.gated else ():
            self.experts[str(i)].also_fused(parts, i)
        self._by_id = {int(i): expert for i, expert in self.experts.items()}
        self.packs = not moe.gated or moe.activation in FUSED
        self._ops: LayerOps | None = None
        self._native: Callable[..., torch.Tensor] | None = None
        self._share = moe, hidden_size, *local_slice(moe)
        self.lora: ExpertsLora | None = None
        self.rounding: Rounding | None = None  # for the inputs that the packed experts take in 8 bits
        self.fixed_order = False  # whether the packed experts' sums have one order

    def take_adapters(self, step: StepLora) -> ExpertsLora | None:
        """Add the adapters' products in later steps. Returns None if experts of this form do not support them."""
        self.lora = _experts_lora(step, self.local, *self._share) if self.gated else None
        return self.lora

    def use(self, ops: LayerOps) -> None:
        """Switch to a platform's operations."""
        self._ops, self._native = ops, None

    def packed(self) -> Callable[..., torch.Tensor] | None:
        """Return the platform's product of all experts, or None if it has none. Call it when the weights are loaded."""
        if self._ops:
            self._native, self._ops = self._ops.packed_experts(self) if self.packs else None, None
        return self._native

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `run_experts`."""
        if self.lora is not None:
            adapted = getattr(self.packed(), "run_adapted", None)
            return run_mixed(x, weights, ids, self.lora, self._form(), self.weigh_inputs, self._run, adapted)
        return self._run(x, weights, ids)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if packed := self.packed():
            return packed(x, weights, ids)
        return run_experts(x, weights, ids, self._by_id, self.weigh_inputs)

    def _form(self) -> ExpertForm:
        first = self._by_id[self.local.start]
        ops = first.down_proj.ops
        return ExpertForm(
            lambda i, rows: (layer := self._by_id[i].gate_up_proj).method.apply_halves(layer, rows),
            first.gate_up_proj.activate,
            lambda i, rows: (layer := self._by_id[i].down_proj).method.apply(layer, rows),
            ops and ops.add_lora,
        )


def pack_experts(model: nn.Module) -> bool:
    """Pack the experts of all layers, whose weights are loaded, before the first step. Returns whether those of each
    layer are one call, for which the host does not wait.
    """
    packed = [module.packed() is not None for module in model.modules() if isinstance(module, ListedExperts)]
    return all(packed)


class StackedExperts(nn.Module):
    """This rank's experts as tensors `[E, 2 I, H]` and `[E, H, I]`."""

    def __init__(self, hidden_size: int, moe: MoESpec, prefix: str):
        super().__init__()
        self.local, self.moe = local_experts(moe), moe
        self.start, self.length = local_slice(moe)
        self._hidden_size, self._prefix = hidden_size, prefix
        num, rows = len(self.local), 2 * self.length
        fused = FusedParts(moe, hidden_size, prefix, self.start, self.length)
        first, second = (
            [*(_sided(parts, side) for side in forms(moe)), lambda expert, i=i: fused.stacked_parts(expert)[i]]
            for i, parts in enumerate((fused.gate_up, fused.down))
        )
        self.gate_up = self._parameter((num, rows, hidden_size), self._gate_up, first)
        self.down = self._parameter((num, hidden_size, self.length), self._down, second)
        self.gate_up_bias = self.down_bias = None
        if moe.bias:
            self.gate_up_bias = self._parameter((num, rows), fused.gate_up_bias, [])
            self.down_bias = self._parameter((num, hidden_size), fused.down_bias, [])
        self.run: Callable[..., torch.Tensor] | None = None
        self.multiply: Callable[..., torch.Tensor] = F.linear  # by a single expert, of rows with adapters
        self.lora: ExpertsLora | None = None
        self._add_lora: Callable[..., None] | None = None

    def take_adapters(self, step: StepLora) -> ExpertsLora | None:
        """Add the adapters' products in later steps."""
        self.lora = _experts_lora(step, self.local, self.moe, self._hidden_size, self.start, self.length)
        return self.lora

    def _parameter(self, shape: tuple[int, ...], parts: Callable, others: list[Callable]) -> nn.Parameter:
        stacked, *alternatives = ([*self._stacked(form)] for form in (parts, *others))
        parameter = empty_parameter(*shape, parts=stacked)
        give_other_parts(parameter, alternatives)
        return parameter

    def _stacked(self, parts_of: Callable[[int], list[Part]]) -> Iterator[Part]:
        """Yield the parts of all experts, each with its place in the stack."""
        for i, expert in enumerate(self.local):
            for part in parts_of(expert):
                yield replace(part, target=((0, i, 1), *((dim + 1, start, n) for dim, start, n in part.target)))

    def _gate_up(self, expert: int) -> list[Part]:
        shape, rows = (self.moe.intermediate_size, self._hidden_size), ((0, self.start, self.length),)
        names = (f"{self._prefix}.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        return [Part(name, shape, rows, ((0, i * self.length, self.length),)) for i, name in enumerate(names)]

    def _down(self, expert: int) -> list[Part]:
        shape, columns = (self._hidden_size, self.moe.intermediate_size), ((1, self.start, self.length),)
        return [Part(f"{self._prefix}.{expert}.down_proj.weight", shape, columns)]

    def use(self, ops: LayerOps) -> None:
        """Switch to a platform's operations."""
        self.run, self._add_lora = ops.fused_experts, ops.add_lora

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `run_experts`."""
        if self.lora is not None:
            return run_mixed(x, weights, ids, self.lora, self._form(), self.moe.weigh_inputs, self._run)
        return self._run(x, weights, ids)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.run or fused_experts)(
            x, weights, ids, self.gate_up, self.down, self.gate_up_bias, self._own_down_bias(),
            self.moe.activation, self.local.start, self.moe.weigh_inputs,
        )  # fmt: skip

    def _own_down_bias(self) -> torch.Tensor | None:
        """Return the bias on one rank only: the sum over the ranks must include it once."""
        return self.down_bias if self.length == self.moe.intermediate_size or tp().rank == 0 else None

    def _form(self) -> ExpertForm:
        def product(stack: torch.Tensor, biases: torch.Tensor | None) -> Callable[[int, torch.Tensor], torch.Tensor]:
            first = self.local.start
            return lambda i, rows: self.multiply(rows, stack[i - first], None if biases is None else biases[i - first])

        gate_up, down = product(self.gate_up, self.gate_up_bias), product(self.down, self._own_down_bias())
        return ExpertForm(gate_up, gated(self.moe.activation), down, self._add_lora)


def _experts_lora(step: StepLora, local: range, moe: MoESpec, hidden_size: int, start: int, length: int) -> ExpertsLora:
    sizes = hidden_size, moe.intermediate_size, start, length
    return ExpertsLora(step, local, moe.routing.num_experts, *sizes, moe.interleaved)


def _sided(parts: Callable[[int, bool], list[Part]], transposed: bool) -> Callable[[int], list[Part]]:
    return lambda expert: parts(expert, transposed)


def fused_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    first: int = 0,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """Compute `run_experts` for the experts `first`, `first` + 1 ... with weights `[E, 2 I, H]` and `[E, H, I]` and
    biases `[E, 2 I]` and `[E, H]`; `activation` is a name of `activation.gated`.
    """

    def expert(i: int) -> Product:
        biases = (None if bias is None else bias[i] for bias in (gate_up_bias, down_bias))
        return lambda rows: _one_expert(rows, gate_up[i], down[i], *biases, gated(activation))

    return run_experts(x, weights, ids, {first + i: expert(i) for i in range(len(gate_up))}, weigh_inputs)


def _one_expert(x, gate_up, down, gate_up_bias, down_bias, activate) -> torch.Tensor:
    return F.linear(activate(F.linear(x, gate_up, gate_up_bias)), down, down_bias)


def make_experts(hidden_size: int, moe: MoESpec, prefix: str, weights: WeightFormat) -> ListedExperts | StackedExperts:
    """Return this rank's experts of the layer whose experts' tensors are at `prefix`."""
    plain = weights.linear(f"{prefix}.0.gate_up_proj") is PLAIN
    if plain and moe.gated and moe.activation in FUSED and torch.get_default_device().type != "cpu":
        return StackedExperts(hidden_size, moe, prefix)
    return ListedExperts(hidden_size, moe, prefix, weights)


def local_experts(moe: MoESpec) -> range:
    """Return the experts on this rank. Raises ValueError if the number of ranks does not divide theirs."""
    each = split_size("the number of experts", moe.routing.num_experts, ep())
    return range(ep().rank * each, (ep().rank + 1) * each)


def local_slice(moe: MoESpec) -> tuple[int, int]:
    """Return (first, number) of the intermediate entries of each expert on this rank."""
    group = Group() if ep().size > 1 else tp()
    length = split_size("moe_intermediate_size", moe.intermediate_size, group)
    return group.rank * length, length
