"""Linear methods and experts whose quantized weights are multiplied by the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from quire.worker.cuda.triton_experts import StackedGroups, fused_experts
from quire.worker.cuda.triton_quantized import FEW_ROWS, multiply_blocks, multiply_groups
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups, dequantize, pack_int4, unpack_int4

if TYPE_CHECKING:
    from quire.worker.layers.moe import ListedExperts

_LARGEST = 448.0  # e4m3


class TritonGroups(LinearMethod):
    """Integers in groups, as buffers of the layer: `quantized`, `scales` and `zeros`."""

    fixed_order = True  # each result is one program's sum, in the order of the columns

    def __init__(self, layer: Linear, groups: Groups, dtype: torch.dtype):
        self.layer, self.bits, self.dtype = layer, groups.bits, dtype
        self.group = groups.group if groups.scales.shape[1] > 1 else layer.in_features
        self.zeros = groups.zeros
        layer.register_buffer(
            "quantized", groups.values if groups.bits == 8 else pack_int4(groups.values), persistent=False
        )
        layer.register_buffer("scales", groups.scales, persistent=False)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        numbers = layer.quantized, layer.scales, self.zeros, self.bits, self.group
        return multiply_groups(x if x.stride(1) == 1 else x.contiguous(), *numbers, layer.bias)

    def num_bytes(self, layer: Linear) -> int:
        held = layer.quantized, layer.scales, self.zeros, layer.bias
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the weight, for a tied embedding."""
        stored = self.layer.quantized[ids]
        values = stored if self.bits == 8 else unpack_int4(stored)[:, : self.layer.in_features]
        zeros = None if self.zeros is None else self.zeros[ids]
        return dequantize(values, self.layer.scales[ids], zeros, self.group).to(self.dtype)


class Float8Channels(TritonGroups):
    """8-bit floats with one scale per output, on a GPU that multiplies 8-bit floats: products of more than FEW_ROWS
    rows round each row of the inputs to 8-bit floats, too, as other servers do for all rows.
    """

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= FEW_ROWS:
            return super().apply(layer, x)
        scales = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / _LARGEST
        rounded = (x / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        # torch takes scales per row and column with a result in bfloat16 only
        weight_scales = layer.scales.float().T
        out = torch._scaled_mm(rounded, layer.quantized.T, scales, weight_scales, out_dtype=torch.bfloat16)
        out = out.to(x.dtype)
        return out if layer.bias is None else out + layer.bias

    @staticmethod
    def fits(groups: Groups) -> bool:
        """Whether torch multiplies such a weight."""
        n, k = groups.values.shape
        floats = groups.values.dtype == torch.float8_e4m3fn
        return floats and groups.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0


class TritonBlocks(PlainBlocks):
    """Blocks of a GGUF file, which the layer holds already."""

    fixed_order = True

    def __init__(self, parts: list[Rows], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype

    def finalize(self, layer: Linear) -> None:
        pass

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        x, out, first = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(len(x), layer.out_features), 0
        for part in self.parts:
            last = first + len(part.blocks)
            bias = None if layer.bias is None else layer.bias[first:last]
            multiply_blocks(x, part.blocks, part.type, out, first, bias)
            first = last
        out[:, first:] = 0  # rows that pad the vocabulary
        return out


def grouped_experts(experts: ListedExperts) -> Callable[..., torch.Tensor] | None:
    """The experts, whose weights are integers in groups, as one call, or None if they are not all alike. Their layers'
    buffers become views of the stacks.
    """
    listed = list(experts.experts.values())
    stacks = [_stack([one.gate_up_proj for one in listed]), _stack([one.down_proj for one in listed])]
    if None in stacks:
        return None
    biases = [_stack_biases([getattr(one, name) for one in listed]) for name in ("gate_up_proj", "down_proj")]
    return partial(
        _run, stacks=stacks, biases=biases, activation=listed[0].gate_up_proj.gated, first=experts.local.start,
        weigh_inputs=experts.weigh_inputs,
    )  # fmt: skip


def _run(x, weights, ids, stacks, biases, activation, first, weigh_inputs) -> torch.Tensor:
    return fused_experts(x, weights, ids, *stacks, *biases, activation, first, weigh_inputs)


def _stack(layers: Sequence[Linear]) -> StackedGroups | None:
    methods = [layer.method for layer in layers]
    if not all(isinstance(method, TritonGroups) for method in methods):
        return None
    kinds = {
        (method.bits, method.group, method.zeros is None, layer.quantized.dtype, layer.scales.dtype)
        for method, layer in zip(methods, layers)
    }
    if len(kinds) > 1:
        return None
    dtype = layers[0].quantized.dtype
    values = torch.stack([layer.quantized.view(torch.uint8) for layer in layers]).view(dtype)
    scales = torch.stack([layer.scales for layer in layers])
    zeros = None if methods[0].zeros is None else torch.stack([method.zeros for method in methods])
    for i, layer in enumerate(layers):
        layer.quantized, layer.scales = values[i], scales[i]
        methods[i].zeros = None if zeros is None else zeros[i]
    return StackedGroups(values, scales, zeros, methods[0].bits, methods[0].group)


def _stack_biases(layers: Sequence[Linear]) -> torch.Tensor | None:
    return None if layers[0].bias is None else torch.stack([layer.bias for layer in layers])
