"""Linear layers that hold only this rank's share of their weights.

A layer defines how its weights are split over ranks and fused from several checkpoint tensors. A `LinearMethod` defines
the numerics: how the weights are stored and multiplied. A parameter lists its `Part`s: each maps a slice of a
checkpoint tensor to a slice of the parameter. The loader depends only on these parts, so that formats with scales and
zero points can be sharded in their own way.

Parameters are created uninitialised, with torch's default dtype and device (`models.build_model` sets both).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.checkpoints.ranks import share_kv_heads
from quire.worker.host import huge_pages
from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.activation import FUSED, gated
from quire.worker.layers.layer_ops import LayerOps
from quire.worker.layers.lora import Group as LoraGroup
from quire.worker.layers.lora import LinearLora
from quire.worker.layers.onednn import Arranged, multiplies
from quire.worker.layers.rounding import Rounding
from quire.worker.layers.views import View
from quire.worker.parallel import Group, split_size, tp

Narrow = tuple[int, int, int]  # (dim, start, length)
ANY_LENGTH = -1  # size of a dimension that only the file knows
FLOATS = ("F32", "BF16", "F16", "F64")  # types of safetensors


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of one checkpoint tensor, and its destination in a parameter. Narrows are applied one after another; no
    narrows means the whole tensor. `view` rearranges the narrowed slice.

    E.g. rows 8 .. 15 of expert 3 in a stacked parameter: target ((0, 3, 1), (1, 8, 8)).
    """

    name: str  # name of the checkpoint tensor
    shape: tuple[int, ...]  # shape of the whole checkpoint tensor
    source: tuple[Narrow, ...] = ()
    target: tuple[Narrow, ...] = ()
    view: View | None = None
    types: tuple[str, ...] = FLOATS  # its possible types in a safetensors file
    tile: int = 0  # rows after which blocks of rows, that a quantized weight has a scale for, begin anew; 0: never

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of the checkpoint tensor `tensor`, rearranged. A view of its memory where possible."""
        tensor = narrowed(tensor, self.source)
        return self.view(tensor) if self.view else tensor


def narrowed(tensor: torch.Tensor, narrows: tuple[Narrow, ...]) -> torch.Tensor:
    """Return the view of `tensor` after applying `narrows`."""
    for dim, start, length in narrows:
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's rows `start : start + length` of a checkpoint weight of `full` rows; they begin at row `target` of
    the fused weight. `view` rearranges them.
    """

    prefix: str  # e.g. "model.layers.0.self_attn.q_proj"
    full: int
    start: int
    length: int
    target: int = 0
    view: View | None = None
    tile: int = 0  # see `Part`


def empty_parameter(*shape: int, parts: list[Part], dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialised parameter that the loader will fill from `parts`, of torch's default dtype or of `dtype`.

    On CPU it is on huge pages, which are faster to allocate and to read.
    """
    on_host = torch.get_default_device().type == "cpu"
    dtype = dtype or torch.get_default_dtype()
    parameter = nn.Parameter(
        huge_pages.zeros(*shape, dtype=dtype) if on_host else torch.empty(shape, dtype=dtype), requires_grad=False
    )
    parameter.parts = parts
    return parameter


# minimum rows for which upcasting the weight to float32 beats the emulated 16-bit matmul
_WIDEN_ROWS = 6
_MANY_ROWS = 16  # for which a larger piece saves more than one in the core's cache
_PIECE, _CACHED_PIECE = 1 << 22, 1 << 17  # elements of a weight that are upcast at a time: 16 MiB, 512 KiB


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `F.linear` of x `[T, in_features]`, `weight` `[out_features, in_features]` and `bias` `[out_features]`,
    all of one dtype, on the fastest path of the CPU.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if len(x) == 1 and x.dtype in (torch.bfloat16, torch.float16):
        # F.linear calls oneDNN, whose matrix products of one row take up to 2.5 times as long as this
        return (torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0]))[None]
    if len(x) < _WIDEN_ROWS or multiplies(x.dtype):
        return F.linear(x, weight, bias)
    step = max(1, (_PIECE if len(x) >= _MANY_ROWS else _CACHED_PIECE) // weight.shape[1])
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    piece = torch.empty(min(step, len(weight)), weight.shape[1], dtype=torch.float32)
    for i in range(0, len(weight), step):
        upcast = piece[: len(weight) - i].copy_(weight[i : i + step])
        out[:, i : i + step] = F.linear(wide, upcast, None if bias is None else bias[i : i + step].float())
    return out


class LinearMethod:
    """Numerics of a linear layer.

    One instance may serve many layers; the layer owns the stored weights. x is `[T, in_features]`.
    """

    fixed_order = False  # whether a row's result has the same bits in any batch, without `fixed_order_linear`
    rounding: Rounding | None = None  # for the inputs that `apply` takes in 8 bits, if they are attached so

    def create_weights(self, layer: Linear) -> None:
        """Register the parameters of `layer`, uninitialised, each with its `parts`."""
        raise NotImplementedError

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weights and add `layer.bias` if there is one: `[T, out_features]` of x's dtype."""
        raise NotImplementedError

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """Multiply as `apply` does, in float32, possibly rounded to x's dtype first. The result may be in
        `workspace`.
        """
        return self.apply(layer, x).float()

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a layer with a gated activation and apply the activation: `[T, out_features / 2]`."""
        return layer.activate(self.apply(layer, x))

    def apply_halves(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a layer with a gated activation without applying the activation: `[T, out_features]`, of x's
        dtype or in float32.
        """
        return self.apply(layer, x)

    def apply_adapted(self, layer: Linear, x: torch.Tensor, groups: Sequence[LoraGroup]) -> torch.Tensor | None:
        """Multiply as `apply`, or `apply_gated`, does, and add what adapters add before the activation and the
        rounding. Returns None if the caller must add it.
        """
        return None

    def dense_weight(self, layer: Linear) -> torch.Tensor | None:
        """Return the weight `[out_features, in_features]` by which `apply` multiplies one row, with `product`, or None
        if there is no such tensor.
        """
        return None

    def num_bytes(self, layer: Linear) -> int:
        """Return bytes of the weights of `layer` once they are loaded."""
        return sum(parameter.nbytes for parameter in layer.parameters(recurse=False))

    def finalize(self, layer: Linear) -> None:
        """Prepare the weights once they are loaded, and again when faster kernels become available.

        May repack the weights or give the layer another method.
        """


class PlainLinear(LinearMethod):
    """Weights as in the checkpoint, in one floating-point dtype."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = empty_parameter(layer.out_features, layer.in_features, parts=layer.weight_parts())

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and (arranged := layer.arranged(x.dtype)) is not None:
            return arranged.product(x, layer.bias)
        return product(x, layer.weight, layer.bias)

    def dense_weight(self, layer: Linear) -> torch.Tensor | None:
        return layer.weight

    def finalize(self, layer: Linear) -> None:
        layer.forget_arranged()
        if layer.ops and (method := layer.ops.linear_method(layer)):
            layer.method = method


class MatrixLinear(PlainLinear):
    """A weight that stays a matrix, because other code multiplies by it, too."""

    fixed_order = True  # no product of its own

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return product(x, layer.weight, layer.bias)

    def finalize(self, layer: Linear) -> None:
        pass


PLAIN, MATRIX = PlainLinear(), MatrixLinear()


class WeightFormat:
    """Chooses the `LinearMethod` of each layer when the model is built.

    This base class keeps floating-point weights unchanged.
    """

    def linear(self, prefix: str) -> LinearMethod:
        """Return the method of the layer at `prefix`, e.g. "model.layers.0.self_attn.qkv_proj"."""
        return PLAIN

    def head(self, prefix: str) -> LinearMethod:
        """Return the method of the output head."""
        return PLAIN

    def matrix(self, prefix: str) -> LinearMethod:
        """Return the method of a layer whose weight is needed as a matrix of the model's type."""
        return MATRIX

    def embedding(self, prefix: str) -> LinearMethod | None:
        """Return the method of an embedding that the checkpoint stores in a format of its own, else None."""
        return None

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        """Return whether the checkpoint tensor `name`, which `read` returns, is not needed."""
        return False


PLAIN_WEIGHTS = WeightFormat()


class Linear(nn.Module):
    """Base of the linear layers. `in_features` and `out_features` are this rank's; `bias` is None or `[out_features]`.

    `weight` is a parameter shared with another layer; if given, no parameter is created.
    """

    gated: str | None = None  # a key of `activation.GATED`: the activation that `LinearMethod.apply_gated` applies
    takes_adapters: ClassVar[bool] = True  # whether `forward` adds the products of LoRA adapters

    def __init__(
        self, in_features: int, out_features: int, bias: bool, method: LinearMethod, weight: nn.Parameter | None = None
    ):
        super().__init__()
        self.in_features, self.out_features, self.method = in_features, out_features, method
        self.ops: LayerOps | None = None  # None means plain torch
        self.lora: LinearLora | None = None  # adapters of requests, if the server has any for this layer
        if weight is None:
            method.create_weights(self)
        else:
            self.weight = weight
        self.bias = empty_parameter(out_features, parts=self.bias_parts()) if bias else None
        self.forget_arranged()

    def forget_arranged(self) -> None:
        """Drop the arranged copy of the weight, which was replaced."""
        self._arranged: list[Arranged | None] = []  # empty: not tried; in a list, so that it is no state of the module

    def arranged(self, dtype: torch.dtype) -> Arranged | None:
        """Return a copy of the weight that multiplies inputs of `dtype` faster, made at the first call, or None."""
        if not self._arranged:
            self._arranged.append(Arranged.of(self.weight))
        return self._arranged[0] if self.weight.dtype == dtype else None

    def weight_parts(self) -> list[Part]:
        """Return parts of a parameter of shape `[out_features, in_features]`."""
        raise NotImplementedError

    def bias_parts(self) -> list[Part]:
        """Return parts of a parameter of shape `[out_features]`."""
        raise NotImplementedError

    def use(self, ops: LayerOps) -> None:
        """Switch to a platform's operations, from the next `finalize` on."""
        self.ops = ops

    def finalize(self) -> None:
        """Call this when the weights are loaded."""
        self.method.finalize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with this rank's weights and, for rows that have an adapter, with the adapter's."""
        if (adapted := self.adapted(x)) is not None:
            return adapted
        out = self.method.apply(self, x)
        return out if self.lora is None else self.lora.add(x, out, self.ops)

    def adapted(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product with this rank's weights and the adapters', if rows have some and one call computes it,
        after the activation that the method applies.
        """
        groups = [] if self.lora is None else self.lora.groups(len(x))
        return self.method.apply_adapted(self, x, groups) if groups else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class RowProduct(nn.Module):
    """Base of small products with a weight `[N, K]`, in the model's dtype or in `dtype`, that no format quantizes."""

    def __init__(self, in_features: int, out_features: int, prefix: str, dtype: torch.dtype | None = None):
        super().__init__()
        parts = [Part(f"{prefix}.weight", (out_features, in_features))]
        self.weight = empty_parameter(out_features, in_features, parts=parts, dtype=dtype)
        self.multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear


class ColumnParallelLinear(Linear):
    """Splits the outputs over the ranks: this rank's rows are those of `shards`, concatenated."""

    def __init__(self, in_features: int, shards: list[Shard], bias: bool, method: LinearMethod = PLAIN):
        self.shards = shards
        super().__init__(in_features, sum(shard.length for shard in shards), bias, method)

    def weight_parts(self) -> list[Part]:
        return [
            Part(
                f"{s.prefix}.weight",
                (s.full, self.in_features),
                ((0, s.start, s.length),),
                ((0, s.target, s.length),),
                s.view,
                tile=s.tile,
            )
            for s in self.shards
        ]

    def bias_parts(self) -> list[Part]:
        return [
            Part(f"{s.prefix}.bias", (s.full,), ((0, s.start, s.length),), ((0, s.target, s.length),), s.view)
            for s in self.shards
        ]


def whole(in_features: int, out_features: int, prefix: str, weights: WeightFormat) -> ColumnParallelLinear:
    """Return a projection without bias, all of it on every rank."""
    shard = Shard(prefix, out_features, 0, out_features)
    return ColumnParallelLinear(in_features, [shard], False, weights.linear(prefix))


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of the same input, each to `size` outputs, as one matmul. The outputs are concatenated in the
    order of `names`. With `fused` the checkpoint holds them as one tensor of that name.

    Raises:
        ValueError: the number of ranks does not divide `size`, which the message calls `size_name`.
    """

    def __init__(
        self,
        in_features: int,
        size: int,
        names: tuple[str, ...],
        bias: bool,
        prefix: str,
        size_name: str = "size",
        method: LinearMethod = PLAIN,
        fused: str | None = None,
    ):
        group = tp()
        length = split_size(size_name, size, group)
        shards = [
            Shard(f"{prefix}.{name}", size, group.rank * length, length, i * length) for i, name in enumerate(names)
        ]
        super().__init__(in_features, fuse(shards, f"{prefix}.{fused}") if fused else shards, bias, method)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """The first half of a gated MLP: `activation(gate) * up`, `[T, in_features] -> [T, out_features / 2]`.

    `activation` is a name of `activation.gated`. With `fused` the checkpoint holds one tensor, `gate_up_proj`.
    """

    def __init__(
        self,
        in_features: int,
        size: int,
        bias: bool,
        prefix: str,
        method: LinearMethod = PLAIN,
        activation: str = "silu",
        fused: bool = False,
    ):
        self.gated = activation if activation in FUSED else None
        names, one = ("gate_proj", "up_proj"), "gate_up_proj" if fused else None
        super().__init__(in_features, size, names, bias, prefix, "intermediate_size", method, one)
        self.activate = gated(activation)

    def use(self, ops: LayerOps) -> None:
        super().use(ops)
        if self.gated == "silu":
            self.activate = ops.silu_and_mul

    def round_for(self, product: Linear) -> None:
        """Let the activation attach its result in 8 bits if `product`, which reads it, takes that form."""
        if self.gated == "silu" and product.method.rounding is not None:
            self.activate = partial(self.activate, rounding=product.method.rounding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.activate(self.product(x))
        if (adapted := self.adapted(x)) is not None:
            return adapted
        if self.lora is not None and self.lora.applies():
            halves = self.lora.add(x, self.method.apply_halves(self, x), self.ops)
            return self.activate(halves).to(x.dtype)
        return self.method.apply_gated(self, x)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v as one matmul: this rank's query heads, then its key heads, then its value heads.

    With fewer KV heads than ranks, several consecutive ranks hold the same KV head, which their query heads use. With
    `fused` the checkpoint holds the three as one tensor, `qkv_proj`. `view` rearranges the rows of q and k.
    `v_name` is the tensor of v, which may be that of k. With `chunks` the one tensor has that many parts, each with q,
    k and v of some heads.

    Raises:
        ValueError: the number of ranks does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        prefix: str,
        method: LinearMethod = PLAIN,
        fused: bool = False,
        view: View | None = None,
        v_head_dim: int | None = None,
        v_name: str = "v_proj",
        chunks: int = 0,
    ):
        group = tp()
        v_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_heads = split_size("num_attention_heads", num_heads, group)
        self.num_kv_heads, first_kv_head = split_kv_heads(num_kv_heads, group)
        q, k, v = self.num_heads * head_dim, self.num_kv_heads * head_dim, self.num_kv_heads * v_dim
        shards = [
            Shard(f"{prefix}.q_proj", num_heads * head_dim, group.rank * q, q, view=view),
            Shard(f"{prefix}.k_proj", num_kv_heads * head_dim, first_kv_head * head_dim, k, q, view),
            Shard(f"{prefix}.{v_name}", num_kv_heads * v_dim, first_kv_head * v_dim, v, q + k),
        ]
        if chunks:
            shards = chunked(shards, f"{prefix}.qkv_proj", chunks)
        elif fused:
            shards = fuse(shards, f"{prefix}.qkv_proj")
        super().__init__(hidden_size, shards, bias, method)


def chunked(shards: list[Shard], prefix: str, chunks: int) -> list[Shard]:
    """Return the same rows of one weight, at `prefix`, that consists of `chunks` parts, each of which holds as many
    rows of every weight of `shards`, one weight after another.
    """
    sizes = [shard.full // chunks for shard in shards]
    tile, found = sum(sizes), []
    for shard, size, offset in zip(shards, sizes, [0, *accumulate(sizes)]):
        row, end = shard.start, shard.start + shard.length
        while row < end:
            chunk, local = divmod(row, size)
            length = min(end - row, size - local)
            start, target = chunk * tile + offset + local, shard.target + row - shard.start
            found.append(Shard(prefix, tile * chunks, start, length, target, shard.view, tile))
            row += length
    return found


def fuse(shards: list[Shard], prefix: str) -> list[Shard]:
    """Return the same rows of one weight, at `prefix`, that holds all rows of the weights of `shards` one after
    another.
    """
    starts = [0, *accumulate(shard.full for shard in shards)]
    return [
        replace(shard, prefix=prefix, full=starts[-1], start=start + shard.start)
        for shard, start in zip(shards, starts)
    ]


class RowParallelLinear(Linear):
    """Splits the inputs over the ranks and sums the partial products over them.

    Raises:
        ValueError: the number of ranks does not divide `in_features`, which the message calls `size_name`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        prefix: str,
        size_name: str = "size",
        method: LinearMethod = PLAIN,
    ):
        self.group, self.full_in_features, self.prefix = tp(), in_features, prefix
        super().__init__(split_size(size_name, in_features, self.group), out_features, bias, method)

    def weight_parts(self) -> list[Part]:
        return [
            Part(
                f"{self.prefix}.weight",
                (self.out_features, self.full_in_features),
                ((1, self.group.rank * self.in_features, self.in_features),),
            )
        ]

    def bias_parts(self) -> list[Part]:
        return [Part(f"{self.prefix}.bias", (self.out_features,))]

    def finalize(self) -> None:
        if self.group.rank > 0:
            self.bias = None  # the sum must include the bias once
        super().finalize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.product(x))


def split_kv_heads(num_kv_heads: int, group: Group) -> tuple[int, int]:
    """Return `(number, first)` of the KV heads that this rank holds.

    Raises ValueError if the number of ranks is neither a divisor nor a multiple of the number of KV heads.
    """
    number = share_kv_heads(num_kv_heads, group.size)
    if num_kv_heads >= group.size:
        return number, group.rank * number
    return number, group.rank * num_kv_heads // group.size
