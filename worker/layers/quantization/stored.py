"""Weights that a checkpoint stores quantized: the common parts of all formats.

A format (`CheckpointFormat`) names the `Scheme` of each weight `[out, in]` of the checkpoint. A scheme knows the
tensors that store the weight and decodes them. `StoredWeights` loads the tensors of this rank's part of each weight
that a layer consists of, as they are in the file, and decodes them when all are there: to integers in groups
(`int_groups`), which the platform multiplies as they are, or else to the model's floating-point type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from quire.worker.layers.linear import ANY_LENGTH, MATRIX, PLAIN, Linear, LinearMethod, Part, WeightFormat
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups, dequantize, give_groups, needs_of
from quire.worker.layers.views import RowOrder, View

Decoded = Groups | Rows | torch.Tensor
ROWS, COLUMNS = 0, 1
SAFETENSORS_TYPES = {
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
    torch.int32: ("I32",),
    torch.int64: ("I64", "I32"),
    torch.float32: ("F32", "BF16", "F16"),
    torch.float8_e4m3fn: ("F8_E4M3",),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows and columns, as (start, length), of one checkpoint weight that a layer holds. `target` is the first of
    them in the layer's own rows.
    """

    name: str  # prefix of its tensors, e.g. "model.layers.0.self_attn.q_proj"
    shape: tuple[int, int]  # shape of the whole weight
    rows: tuple[int, int]
    columns: tuple[int, int]
    target: int
    view: View | None = None  # rearranges them
    tile: int = 0  # see `Part`; the rows are of one tile

    @classmethod
    def from_part(cls, part: Part) -> Piece:
        """Return the piece that a part of an unquantized weight describes."""
        ranges = [(0, part.shape[0]), (0, part.shape[1])]
        for dim, start, length in part.source:
            ranges[dim] = ranges[dim][0] + start, length
        target = sum(start for dim, start, _ in part.target if dim == ROWS)
        return cls(part.name.removesuffix(".weight"), part.shape, *ranges, target, part.view, part.tile)

    @property
    def size(self) -> tuple[int, int]:
        return self.rows[1], self.columns[1]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a stored tensor, along the rows or columns of the weight: `entries` entries hold `values` of them.

    E.g. 32 values of 4 bits in 4 words of 32 bits; or a scale for 128 columns. `whole` tensors are not sliced.
    """

    of: int  # ROWS or COLUMNS
    values: int = 1
    entries: int = 1
    whole: bool = False

    def size(self, piece: Piece) -> int:
        tile = self._tile(piece)
        return piece.shape[self.of] // tile * -(-tile * self.entries // self.values)

    def _tile(self, piece: Piece) -> int:
        return piece.tile if self.of == ROWS and piece.tile else piece.shape[self.of]

    def covered(self, piece: Piece) -> tuple[int, int]:
        """Return the entries (start, length) in which the piece is."""
        if self.whole:
            return 0, self.size(piece)
        start, length = (piece.rows, piece.columns)[self.of]
        before, start = divmod(start, self._tile(piece))
        before *= -(-self._tile(piece) * self.entries // self.values)
        first = start // self.values * self.entries + before
        end = -(-(start + length) // self.values) * self.entries + before
        return first, min(end, self.size(piece)) - first

    def trim(self, piece: Piece, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the piece's values of a tensor that has been unpacked from the covered entries, one value each."""
        start, length = (piece.rows, piece.columns)[self.of]
        start = start if self.whole else start % self._tile(piece) % self.values
        return tensor.narrow(dim, start, length)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the checkpoint: its name after the weight's prefix, dimensions (an Axis, or a number of entries that
    does not depend on the weight) and type once loaded; `types` are the types that the file may have.
    """

    suffix: str
    axes: tuple[Axis | int, ...]
    dtype: torch.dtype
    types: tuple[str, ...] = ()

    def parameter(self, piece: Piece) -> nn.Parameter:
        """Return an uninitialised parameter for the entries that cover the piece."""
        shape, lengths, source = [], [], []
        for dim, axis in enumerate(self.axes):
            start, length = (0, axis) if isinstance(axis, int) else axis.covered(piece)
            shape.append(axis if isinstance(axis, int) else axis.size(piece))
            lengths.append(length)
            if length != shape[-1]:
                source.append((dim, start, length))
        lengths = [0 if length == ANY_LENGTH else length for length in lengths]
        parameter = nn.Parameter(torch.empty(lengths, dtype=self.dtype), requires_grad=False)
        types = self.types or SAFETENSORS_TYPES[self.dtype]
        parameter.parts = [Part(f"{piece.name}.{self.suffix}", tuple(shape), tuple(source), types=types)]
        return parameter


class Scheme(ABC):
    """The storage of one weight."""

    @abstractmethod
    def tensors(self, piece: Piece) -> dict[str, Stored]:
        """Return the tensors to load for a piece, by any short name."""

    @abstractmethod
    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Decoded:
        """Return the piece as integers in groups, or dequantized in float32 or a narrower type `[rows, columns]`; these
        share no memory with `tensors`. Or the blocks of a GGUF file, as they are.
        """

    def needs(self, piece: Piece) -> frozenset[str]:
        """Return the piece's requirements on kernels (`Groups.needs`), without which it is dequantized at load."""
        return frozenset()

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        """Return bytes of the piece once it is loaded, unless it is dequantized; `itemsize` is that of the model's
        type.
        """
        return piece.rows[1] * piece.columns[1] * itemsize


class IntegerGroups(Scheme):
    """Base of integers of `bits` bits in groups of columns (None: one per row), with a scale and by `has_zeros` a zero
    point for each. With `act_order` a tensor names the group of each column.
    """

    def __init__(self, bits: int, group: int | None, has_zeros: bool, act_order: bool = False):
        self.bits, self.group, self.has_zeros, self.act_order = bits, group, has_zeros, act_order
        # with act_order, columns of any group may be in a slice of the columns
        self.groups = 1 if group is None else Axis(COLUMNS, group, whole=act_order)

    @property
    def stored_bits(self) -> int:
        """Return the bits of an integer once it is loaded."""
        return 4 if self.bits <= 4 else 8

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        n, k = piece.size
        order = 8 * k if self.act_order else 0
        tables = 2 * (1 + self.has_zeros) * n * (1 if self.group is None else -(-k // self.group))  # for 16 bits
        return n * k * self.stored_bits // 8 + tables + order

    def needs(self, piece: Piece) -> frozenset[str]:
        return groups_needs(self.group)


class Unquantized(Scheme):
    """A weight that the format leaves unquantized, fused in one layer with quantized ones."""

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        return {
            "weight": Stored("weight", (Axis(ROWS), Axis(COLUMNS)), torch.get_default_dtype(), ("F32", "BF16", "F16"))
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].clone()


class CheckpointFormat(WeightFormat):
    """Base of the formats that config.json declares in `quantization_config`.

    Its patterns are of names in the files, which the layers do not know: `modules` returns the names that files may
    have for a module of the decoder.
    """

    weights: Scheme | None = None  # for the layers that no pattern names

    def __init__(self) -> None:
        self.modules: Callable[[str], Sequence[str]] = lambda name: [name]

    def find(self, name: str) -> Scheme | None:
        """Return the scheme of the decoder's weight with the prefix `name`; None if it is plain, by any of its
        names.
        """
        found = [self.scheme(module) for module in self.modules(name)]
        if not all(found):
            return None
        return next((scheme for scheme in found if scheme is not self.weights), found[0])

    def scheme(self, name: str) -> Scheme | None:
        """Return the scheme of the weight with the prefix `name`, e.g. "model.layers.0.mlp.up_proj"; None if it is
        plain.
        """
        raise NotImplementedError

    def linear(self, prefix: str) -> LinearMethod:
        return FromCheckpoint(self)

    def head(self, prefix: str) -> LinearMethod:
        return PLAIN if "embed_tokens" in prefix else FromCheckpoint(self)  # a tied embedding is plain

    def matrix(self, prefix: str) -> LinearMethod:
        return FromCheckpoint(self, MATRIX)


class FromCheckpoint(LinearMethod):
    """Gives a layer the method that fits the weights it consists of; `plain` is that of weights in the model's type."""

    def __init__(self, weights: CheckpointFormat, plain: LinearMethod = PLAIN):
        self.weights, self.plain = weights, plain

    def create_weights(self, layer: Linear) -> None:
        pieces = [Piece.from_part(part) for part in layer.weight_parts()]
        schemes = [self.weights.find(piece.name) for piece in pieces]
        layer.method = StoredWeights(pieces, schemes, self.plain) if any(schemes) else self.plain
        layer.method.create_weights(layer)


class StoredWeights(LinearMethod):
    """The tensors of a layer's weights as they are in the checkpoint, until `finalize` decodes them. If `plain` is
    MATRIX, they are dequantized whatever the platform multiplies.
    """

    def __init__(self, pieces: list[Piece], schemes: list[Scheme | None], plain: LinearMethod):
        self.pieces, self.schemes = pieces, [scheme or Unquantized() for scheme in schemes]
        self.dtype, self.plain = torch.get_default_dtype(), plain

    def create_weights(self, layer: Linear) -> None:
        layer.weight = None
        for i, (piece, scheme) in enumerate(zip(self.pieces, self.schemes)):
            for name, stored in scheme.tensors(piece).items():
                layer.register_parameter(f"stored_{i}_{name}", stored.parameter(piece))

    def num_bytes(self, layer: Linear) -> int:
        bias = 0 if layer.bias is None else layer.bias.nbytes
        size = self.dtype.itemsize
        parts = list(zip(self.pieces, self.schemes))
        needs = frozenset().union(*(scheme.needs(piece) for piece, scheme in parts))
        if self.plain is MATRIX or not self._takes(layer, needs):
            return bias + layer.out_features * layer.in_features * size
        return bias + sum(scheme.num_bytes(piece, size) for piece, scheme in parts)

    def finalize(self, layer: Linear) -> None:
        decoded = [self._take(layer, i) for i in range(len(self.pieces))]
        if self.plain is MATRIX:
            return self._dequantize(layer, decoded)
        if all(isinstance(part, Rows) for part in decoded):
            layer.method = PlainBlocks(layer, decoded, self.dtype)
            return layer.method.finalize(layer)
        if merged := Groups.merged(decoded, layer.out_features):
            for groups in (merged, merged.regrouped()):
                if groups and self._takes(layer, groups.needs):
                    return give_groups(layer, groups, self.dtype)
        self._dequantize(layer, decoded)

    def _takes(self, layer: Linear, needs: frozenset[str]) -> bool:
        """Return whether the layer keeps groups with these needs as they are. Groups without needs have kernels, or
        will, on any platform.
        """
        return not needs or (
            layer.ops is not None and needs <= layer.ops.takes and self.dtype in layer.ops.quantized_types
        )

    def _dequantize(self, layer: Linear, decoded: list[Decoded]) -> None:
        device = tensors_of(decoded[0]).device
        whole = torch.zeros(layer.out_features, layer.in_features, dtype=self.dtype, device=device)
        for piece, weight in zip(self.pieces, decoded):
            dense = weight if isinstance(weight, torch.Tensor) else weight.dequantized()
            whole[piece.target : piece.target + piece.rows[1]] = dense
        layer.weight, layer.method = nn.Parameter(whole, requires_grad=False), self.plain
        self.plain.finalize(layer)

    def _take(self, layer: Linear, i: int) -> Decoded:
        """Decode piece i, whose tensors the layer gives up."""
        names = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(f"stored_{i}_")]
        tensors = {name.removeprefix(f"stored_{i}_"): getattr(layer, name).data for name in names}
        piece, decoded = self.pieces[i], self.schemes[i].decode(self.pieces[i], tensors)
        for name in names:
            delattr(layer, name)
        if piece.view is None:
            return decoded
        if isinstance(decoded, torch.Tensor):
            return piece.view(decoded)
        if isinstance(piece.view, RowOrder):
            return decoded.select_rows(piece.view(torch.arange(piece.rows[1], device=tensors_of(decoded).device)))
        return piece.view(decoded.dequantized())


def tensors_of(decoded: Decoded) -> torch.Tensor:
    """Return the tensor that holds the values."""
    if isinstance(decoded, Groups):
        return decoded.values
    return decoded.blocks if isinstance(decoded, Rows) else decoded


def signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 of unsigned integers that are stored with 2 ** (bits - 1) added."""
    return (values.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def grouped(
    piece: Piece,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int | None,
    group_of: torch.Tensor | None = None,
    table: tuple[float, ...] | None = None,
    row_scales: torch.Tensor | None = None,
) -> Groups | torch.Tensor:
    """Return the piece in groups of equal length, or dequantized if its columns cannot be arranged so.

    values are int8 `[n, k]`; scales and zeros `[n, groups]` cover the columns' groups or, with `group_of` `[k]`, are
    those of the whole weight. The other arguments are as in `Groups`.
    """
    k = values.shape[1]
    if zeros is not None and not zeros.any():
        zeros = None
    if group is None:
        return Groups(values, scales.contiguous(), zeros, bits, k)
    if group_of is not None:
        order = group_of.argsort(stable=True)
        present, counts = group_of[order].unique_consecutive(return_counts=True)
        if bool((counts[:-1] == group).all()) and int(counts[-1]) <= group:
            zeros = None if zeros is None else zeros[:, present]
            straight = torch.equal(order, torch.arange(k, device=order.device))
            return Groups(values[:, order], scales[:, present], zeros, bits, group, None if straight else order)
        return dequantize(values, scales, zeros, group_of)
    start = piece.columns[0] % group
    if start == 0:
        return Groups(values, scales.contiguous(), zeros, bits, group, None, table, row_scales)
    # a slice that begins inside a group
    columns = (torch.arange(k, device=values.device) + start) // group
    return dequantize(values, scales, zeros, columns, table, row_scales)


def groups_needs(group: int | None) -> frozenset[str]:
    """Return `Scheme.needs` of integers in groups of `group` columns, or in whole rows."""
    return frozenset() if group is None or any(group % size == 0 for size in (32, 64, 128)) else needs_of(group)


def named_by(name: str, pattern: str) -> bool:
    """Return whether `pattern`, a dotted part of module names such as "lm_head" or "layers.0.mlp", is in the name."""
    return f".{pattern}." in f".{name}."


def unsupported(setting: str, value: object, supported: str) -> NoReturn:
    raise ValueError(f"quantization_config: {setting} {value!r} is not supported; supported: {supported}")
