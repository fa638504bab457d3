"""The experts of a layer as stacks of weights for the grouped kernels (`triton_experts`), made from linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from quire.worker.cuda.kernels import triton_experts_fp8
from quire.worker.cuda.kernels.triton_experts import Stack, StackedBlocks, fused_experts
from quire.worker.cuda.kernels.triton_quantized import StoredGroups
from quire.worker.cuda.quantized import TritonBlocks, TritonGroups
from quire.worker.layers.linear import Linear, PlainLinear
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.int_groups import Reordered

if TYPE_CHECKING:
    from quire.worker.layers.moe import ListedExperts


def grouped_experts(experts: ListedExperts, multiplies_floats8: bool = False) -> Callable[..., torch.Tensor] | None:
    """Return the experts as one call, or None if their weights are not all alike. The layers' weights become views of
    the stacks. `multiplies_floats8`: the device multiplies 8-bit floats.
    """
    listed = list(experts.experts.values())
    gate_up, down = [one.gate_up_proj for one in listed], [one.down_proj for one in listed]
    if not (_are_stackable(gate_up) and _are_stackable(down)):
        return None
    stacks = [_stack(layers) for layers in (gate_up, down)]
    biases = [_stack_biases(layers) for layers in (gate_up, down)]
    rounds = multiplies_floats8 and all(map(triton_experts_fp8.fits, stacks)) and biases == [None, None]
    rounds = rounds and not experts.fixed_order
    if rounds:
        experts.rounding = triton_experts_fp8.ROUNDING
    return partial(
        _run, rounds=rounds, stacks=stacks, biases=biases, activation=gate_up[0].gated, first=experts.local.start,
        weigh_inputs=experts.weigh_inputs, fixed_order=experts.fixed_order,
    )  # fmt: skip


def _run(x, weights, ids, rounds, stacks, biases, activation, first, weigh_inputs, fixed_order) -> torch.Tensor:
    if rounds and triton_experts_fp8.are_many(ids.numel(), len(stacks[0].values)):
        return triton_experts_fp8.fused_experts(x, weights, ids, *stacks, activation, first, weigh_inputs)
    return fused_experts(x, weights, ids, *stacks, *biases, activation, first, weigh_inputs, fixed_order)


def _method(layer: Linear) -> object:
    return layer.method.method if isinstance(layer.method, Reordered) else layer.method


def _are_stackable(layers: Sequence[Linear]) -> bool:
    """Return whether the weights of the layers can be stacked."""
    return len({_kind(layer) for layer in layers}) == 1 and _kind(layers[0]) is not None


def _kind(layer: Linear) -> tuple | None:
    """Return the common properties of the weights of a stack; None if this one cannot be in a stack."""
    method = _method(layer)
    if isinstance(method, TritonGroups):
        reordered = isinstance(layer.method, Reordered)
        return "groups", method.bits, method.group, method.table, layer.quantized.dtype, reordered
    if isinstance(method, TritonBlocks):
        types = {part.type for part in method.parts}
        whole = sum(len(part.blocks) for part in method.parts) == layer.out_features
        return ("blocks", *types) if len(types) == 1 and whole else None
    return ("plain", layer.weight.dtype) if isinstance(method, PlainLinear) and layer.weight is not None else None


def _stack(layers: Sequence[Linear]) -> Stack:
    method = _method(layers[0])
    if isinstance(method, TritonGroups):
        return _stack_groups(layers)
    if isinstance(method, TritonBlocks):
        return _stack_blocks(layers)
    weights = torch.stack([layer.weight.data for layer in layers])
    for layer, weight in zip(layers, weights):
        layer.weight.data = weight
    return weights


def _stack_groups(layers: Sequence[Linear]) -> StoredGroups:
    method = _method(layers[0])
    for layer in layers:  # an expert with an adapter is multiplied by itself, as the stack has it
        _method(layer).leave_tiles(layer)
    if any(layer.zeros is not None for layer in layers):  # without zero points they are all 0
        for layer in layers:
            layer.zeros = torch.zeros_like(layer.scales) if layer.zeros is None else layer.zeros
    names = "quantized", "scales", "zeros", "row_scales", "order"
    quantized, *others = (_stack_tensors(layers, name) for name in names)
    *tables, order = others
    return StoredGroups(quantized, *tables[:2], method.bits, method.group, method.table, tables[2], order)


def _stack_tensors(layers: Sequence[Linear], name: str) -> torch.Tensor | None:
    """Return the buffers `name` of the layers as one tensor, of which they become views."""
    tensors = [getattr(layer, name, None) for layer in layers]
    if tensors[0] is None:
        return None
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):  # scales that are exact in 16 bits, and some that are not
        dtype, tensors = torch.float32, [tensor.float() for tensor in tensors]
    stored = torch.uint8 if dtype.itemsize == 1 else dtype  # not every device stacks 8-bit floats
    stack = torch.stack([tensor.view(stored) for tensor in tensors]).view(dtype)
    for i, layer in enumerate(layers):
        setattr(layer, name, stack[i])
    return stack


def _stack_blocks(layers: Sequence[Linear]) -> StackedBlocks:
    methods = [_method(layer) for layer in layers]
    kind = methods[0].parts[0].type
    stack = torch.stack([torch.cat([part.blocks for part in method.parts]) for method in methods])
    for layer, method, blocks in zip(layers, methods, stack):
        sizes = [len(part.blocks) for part in method.parts]
        method.parts = [Rows(part, kind) for part in blocks.split(sizes)]
        for i, part in enumerate(method.parts):
            setattr(layer, f"blocks_{i}", part.blocks)
    return StackedBlocks(stack, kind)


def _stack_biases(layers: Sequence[Linear]) -> torch.Tensor | None:
    return None if layers[0].bias is None else torch.stack([layer.bias for layer in layers])
