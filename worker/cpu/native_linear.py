"""Linear layers whose weights are packed for the native kernels: in 16 or 12 bits, quantized, or of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_long, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.worker.cpu.native import (
    KERNELS,
    CompactArgs,
    LinearArgs,
    QuantArgs,
)
from quire.worker.cpu.ops import GATED
from quire.worker.host import huge_pages

if TYPE_CHECKING:
    pass


class _NativeLinear:
    """Base class of the library's linear layers.

    A subclass passes `_bind` the library's function for its kind of weight (`run`) and the weight argument of that
    function (`pointer`).
    """

    paths = (0, 1, 2, 3)  # values of `path` that a call accepts

    def __init__(self, shape: tuple[int, int], gated: str | None) -> None:
        self._n, self.in_features = shape
        if gated and self._n % 2:
            raise ValueError(f"a weight of {self._n} rows is no stack of gate and up")
        self.lib, self.flags = KERNELS.lib, GATED[gated] << 1
        self.out_features = self._n // 2 if gated else self._n
        self.columns = self.lib.quire_gemm_packed_columns(self._n, GATED[gated])

    def _bind(self, run: Callable[..., None], pointer: Any, bias: torch.Tensor | None) -> None:
        self.bias = None if bias is None else _packed_bias(bias, self.columns, self.flags > 0)
        self._run, self._pointers = run, (pointer, None if self.bias is None else self.bias.data_ptr())

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        path: int = 0,
        workspace: huge_pages.Workspace | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply x `[..., k]` bfloat16: returns `[..., n]` of `dtype` (bfloat16 or float32), allocated in `workspace`
        (of the same type) if one is given, or writes it to `out` `[T, n]`.

        `path` forces one algorithm: bfloat16 weights take 1 (float vectors) or 3 (the same algorithm for any number of
        rows); quantized weights take 1 (integers without AMX), 2 (integers with AMX) or 3 (the algorithm for many
        rows).
        """
        assert path in self.paths
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if out is None:
            shape = rows.shape[0], self.out_features
            out = torch.empty(shape, dtype=dtype) if workspace is None else workspace.take(*shape)
        self._run(
            rows.data_ptr(),
            rows.stride(0),
            *self._pointers,
            out.data_ptr(),
            out.stride(0),
            rows.shape[0],
            self._n,
            self.in_features,
            self.flags | (dtype is torch.float32),
            path,
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def halves(self, x: torch.Tensor, path: int = 0) -> torch.Tensor:
        """Return the gate and up of x `[T, k]` before the activation, side by side: `[T, n]` float32."""
        rows = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), self.columns, dtype=torch.float32)
        sizes = len(x), self.columns, self.in_features
        is_float32 = 1
        pointers = rows.data_ptr(), rows.stride(0), *self._pointers, out.data_ptr(), out.stride(0)
        self._run(*pointers, *sizes, is_float32, path)
        # as packed: 16 columns of the gate, 16 of up, and so on
        halves = out.view(len(x), -1, 2, 16).transpose(1, 2).reshape(len(x), 2, -1)
        return halves[:, :, : self.out_features].reshape(len(x), -1)

    def _rows(self, take: Callable[..., None], ids: torch.Tensor) -> torch.Tensor:
        assert not self.flags, "rows of gate and up are interleaved"
        ids, out = ids.long(), torch.empty(ids.shape[0], self.in_features, dtype=torch.bfloat16)
        take(self._pointers[0], ids.data_ptr(), ids.shape[0], out.data_ptr(), self.in_features, self.in_features)
        return out


class PackedLinear(_NativeLinear):
    """Computes x W^T + bias with a bfloat16 weight `[n, k]`, packed once so that a product of any number of rows reads
    it sequentially. The caller may free the original.

    The sum over k is float32 in one fixed order, so a row's result depends neither on the other rows nor on the
    threads. Exception: without AMX, a compact weight is multiplied in fixed point (csrc/gemm_fixed.h) from 6 rows on
    (AVX2: 9; float32 outputs: 33); path 3 forces the fixed order. With `gated`, a key of GATED, the weight is [gate,
    up] stacked and the result is e.g. `silu(gate) * up` `[.., n / 2]`, computed in float32 and then rounded.

    With `compact` each weight is stored losslessly in 12 bits instead of 16 (csrc/compact.h) if its exponents allow it.

    Raises:
        ValueError: the weight is not bfloat16, or has an odd number of rows with `gated`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: str | None = None, compact: bool = True
    ) -> None:
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"PackedLinear takes a bfloat16 weight, not {weight.dtype}")
        super().__init__(tuple(weight.shape), gated)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.compact = _Compact.from_weight(weight, self.columns, gated) if compact else None
        if self.compact is not None:
            self.packed, self.paths = self.compact.data, (0, 3)
            return self._bind(self.lib.quire_gemm_run_compact, byref(self.compact.args), bias)
        n, k = weight.shape
        self.packed = huge_pages.lasting(self.columns * (-(-k // 32) * 32), dtype=torch.bfloat16)
        self.lib.quire_gemm_pack(weight.data_ptr(), weight.stride(0), self.packed.data_ptr(), n, k, GATED[gated])
        self._bind(self.lib.quire_gemm_run, self.packed.data_ptr(), bias)

    def args(self, path: int = 0) -> LinearArgs:
        """Return the C struct of this layer, which must outlive the struct."""
        packed, compact = (self._pointers[0], None) if self.compact is None else (None, addressof(self.compact.args))
        bias = self._pointers[1]
        return LinearArgs(packed, None, compact, bias, self._n, self.in_features, self.flags >> 1, path, None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the original weight: `[T, k]`. Lets an embedding share the packed head."""
        return self._rows(self.lib.quire_gemm_unpack_rows if self.compact is None else self.lib.quire_compact_rows, ids)


class _Compact:
    """Owns the memory of a packed weight in 12 bits, to which `args` points."""

    # Upper limit: at 1 / 64 their list takes 1/12 of the memory, and putting them in place a tenth of the time.
    _EXCEPTIONS_PER_WEIGHT = 1 / 64

    def __init__(self, columns: int, k: int) -> None:
        blocks, self.steps = columns // 32, -(-k // 32)
        self.num_weights = blocks * self.steps * 1024
        self.data = huge_pages.zeros(self.num_weights // 4 * 3, dtype=torch.uint16)
        self.exceptions = torch.empty(int(self.num_weights * self._EXCEPTIONS_PER_WEIGHT) + 1, dtype=torch.uint64)
        self.first = torch.empty(blocks, dtype=torch.uint32)
        self.scales = torch.empty(blocks, dtype=torch.float32)
        self.units = torch.empty(columns * -(-k // 256), dtype=torch.uint8)

    @classmethod
    def from_weight(cls, weight: torch.Tensor, columns: int, gated: str | None) -> _Compact | None:
        """Return the weight in 12 bits, or None if it has too many different exponents."""
        (n, k), self = weight.shape, cls(columns, weight.shape[1])
        count = KERNELS.lib.quire_gemm_compact(
            weight.data_ptr(),
            weight.stride(0),
            self.data.data_ptr(),
            self.exceptions.data_ptr(),
            self.first.data_ptr(),
            self.scales.data_ptr(),
            self.units.data_ptr(),
            n,
            k,
            GATED[gated],
            len(self.exceptions) - 1,
        )
        if count < 0:
            return None
        self.exceptions = self.exceptions[: count + 1].clone()
        self.data = huge_pages.lasting(len(self.data), dtype=torch.uint16).copy_(self.data)
        self.args = CompactArgs(
            self.data.data_ptr(),
            self.exceptions.data_ptr(),
            self.first.data_ptr(),
            self.scales.data_ptr(),
            self.steps,
            self.units.data_ptr(),
        )
        return self


@dataclass(frozen=True, slots=True)
class QuantKind:
    """The storage of a quantized weight: `number` in csrc/quant.h, bits per value, columns per scale (0: any of the
    supported numbers), bytes of the scales of 32 rows by `per` columns if they are not a table of numbers, and whether
    there is a table of offsets.
    """

    number: int
    bits: int
    group: int = 0
    scale_bytes: int = 0
    per: int = 1
    offsets: bool = False


_INTEGERS = {4: QuantKind(0, 4), 8: QuantKind(1, 8)}
_E2M1 = QuantKind(2, 4, 32, 32, 32)
_E4M3 = QuantKind(6, 8)
_Q4_0, _Q8_0 = QuantKind(0, 4, 32), QuantKind(1, 8, 32)
# types of GGUF files: `Layout` in csrc/pack_blocks.cpp, and the kind
PACKED_BLOCKS = {
    "Q4_0": (0, _Q4_0),
    "Q8_0": (1, _Q8_0),
    "Q4_K": (2, QuantKind(3, 4, 32, 512, 256)),
    "Q5_K": (3, QuantKind(4, 5, 32, 512, 256)),
    "Q6_K": (4, QuantKind(5, 6, 16, 576, 256)),
    "MXFP4": (5, _E2M1),
    "Q4_1": (6, QuantKind(7, 4, 32, offsets=True)),
    "Q5_0": (7, QuantKind(8, 5, 32)),
    "Q5_1": (8, QuantKind(9, 5, 32, offsets=True)),
    "IQ4_NL": (9, QuantKind(10, 4, 32)),
    "IQ4_XS": (10, QuantKind(13, 4, 32, 256, 256)),
    "Q2_K": (11, QuantKind(11, 2, 16, 640, 256)),
    "Q3_K": (12, QuantKind(12, 3, 16, 448, 256)),
}


class QuantizedLinear(_NativeLinear):
    """Computes x W^T + bias for a weight of 2 to 8 bits with one scale per row and group of columns: weight = scale * q
    + offset. Activations are bfloat16.

    Few rows are multiplied as integers: x becomes 16-bit integers with one scale per at most 256 columns, which is
    finer than bfloat16. With AMX more than 32 rows are multiplied in bfloat16; without AMX 96 rows and more are
    multiplied in fixed point. With `narrow` x becomes 8-bit integers where vector units multiply: without AMX, for any
    number of rows, so that a row's result does not depend on the others. Weights of 8-bit floats ignore it. Build one
    with `quantize` from a bfloat16 weight, with `from_values` from a quantized checkpoint, or with `from_blocks` from
    the blocks of a GGUF file. `rows` and `gated` are as in PackedLinear.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        kind: QuantKind,
        group: int,
        bias: torch.Tensor | None,
        gated: str | None,
        has_offsets: bool,
        scale_type: torch.dtype = torch.bfloat16,
        narrow: bool = False,
    ) -> None:
        super().__init__(shape, gated)
        self.bits, steps = kind.bits, -(-self.in_features // 64)
        self.narrow = narrow
        self.group = group if group > 0 else -(-steps // 4) * 256
        if not kind.group and not self.supports(self.group):
            raise ValueError(
                f"group size {group} is not supported: 32, 64, 128, a multiple of 256, or -1 for one scale per row"
            )
        groups = -(-steps * 64 // self.group)
        self.packed = huge_pages.lasting(self.columns * steps * 8 * kind.bits, dtype=torch.uint8)
        if kind.scale_bytes:
            size, scale_type = self.columns // 32 * -(-steps * 64 // kind.per) * kind.scale_bytes, torch.uint8
        else:
            size = self.columns * groups
        self.scales = huge_pages.lasting(size, dtype=scale_type)
        self.offsets = huge_pages.lasting(size, dtype=scale_type) if has_offsets else None
        self._args = QuantArgs(
            self.packed.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            kind.number,
            self.group,
            groups,
            steps,
            scale_type is torch.float16,
            narrow,
        )
        self._bind(self.lib.quire_gemm_run_quant, byref(self._args), bias)

    @staticmethod
    def supports(group: int, num_groups: int = 2) -> bool:
        """Return whether there are kernels for groups of this size, or for a single group."""
        return num_groups == 1 or group in (32, 64, 128) or group % 256 == 0

    @classmethod
    def quantize(
        cls,
        weight: torch.Tensor,
        bits: int,
        group: int = 64,
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Quantize a bfloat16 weight `[n, k]` symmetrically. Each group's scale minimizes the squared error (4 bits) or
        follows from the largest entry (8 bits).

        Raises:
            ValueError: bits, group or the weight's type are not supported.
        """
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"only bfloat16 weights can be quantized, not {weight.dtype}")
        linear = cls(tuple(weight.shape), _integers(bits), group, bias, gated, has_offsets=False, narrow=narrow)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        linear.lib.quire_quantize(
            weight.data_ptr(),
            weight.stride(0),
            linear.packed.data_ptr(),
            linear.scales.data_ptr(),
            *weight.shape,
            bits,
            linear.group,
            GATED[gated],
        )
        return linear

    @classmethod
    def from_values(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        bits: int,
        group: int,
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Pack a quantized weight: weight = scale * value + offset.

        values are int8 `[n, k]` (-8 .. 7 for 4 bits); scales and offsets are `[n, ceil(k / group)]` and are rounded to
        float16, or to bfloat16 if float16 lacks their range. Or values are float8_e4m3fn, without offsets; then the
        scales stay float32.

        Raises:
            ValueError: bits or group are not supported, or the shapes do not match.
        """
        if values.dtype == torch.float8_e4m3fn:
            values, stored, scale_type, narrow = values.view(torch.int8), _E4M3, torch.float32, False
        else:
            stored, scale_type = _integers(bits), _type_of_scales(scales, offsets)
        linear = cls(tuple(values.shape), stored, group, bias, gated, offsets is not None, scale_type, narrow)
        if scales.shape != (len(values), -(-values.shape[1] // linear.group)) or (
            offsets is not None and offsets.shape != scales.shape
        ):
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} do not fit values of shape {tuple(values.shape)} in "
                f"groups of {group}"
            )
        values, scales = values.contiguous(), scales.float().contiguous()
        offsets = None if offsets is None else offsets.float().contiguous()
        linear.lib.quire_pack_quantized(
            values.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            byref(linear._args),
            *values.shape,
            GATED[gated],
        )
        return linear

    @property
    def is_bytes(self) -> bool:
        """Return whether the weight is scale * integer of 8 bits, multiplied by activations of 16 bits."""
        return self._args.kind == _INTEGERS[8].number and self.offsets is None and not self.narrow

    @property
    def parts(self) -> list[QuantizedLinear]:
        """Return the parts, as a `MixedLinear` does: only itself."""
        return [self]

    @classmethod
    def from_blocks(
        cls,
        parts: Sequence[torch.Tensor],
        kind: str,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Pack a weight `shape` from the blocks of a GGUF file, uint8 `[rows, bytes]` of each part, in the type `kind`,
        a key of PACKED_BLOCKS. Rows that are missing are zero.
        """
        layout, stored = PACKED_BLOCKS[kind]
        linear = cls(shape, stored, stored.group, bias, gated, stored.offsets, torch.float16, narrow)
        assert all(part.is_contiguous() for part in parts)
        pointers, lengths = (c_void_p * len(parts))(*(part.data_ptr() for part in parts)), (c_long * len(parts))()
        lengths[:] = [len(part) for part in parts]
        numbers = len(parts), layout, byref(linear._args), *shape, GATED[gated]
        linear.lib.quire_pack_blocks(pointers, lengths, *numbers)
        return linear

    def args(self, path: int = 0, next: LinearArgs | None = None) -> LinearArgs:
        """Return the C struct of this layer, which must outlive the struct, as must `next`, the columns after these."""
        return LinearArgs(
            None,
            addressof(self._args),
            None,
            self._pointers[1],
            self._n,
            self.in_features,
            self.flags >> 1,
            path,
            None if next is None else addressof(next),
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the dequantized weight: `[T, k]` bfloat16."""
        return self._rows(self.lib.quire_quant_rows, ids)


class MixedLinear:
    """Linear layers of weights of different kinds, whose outputs are concatenated, e.g. q, k and v."""

    def __init__(self, parts: Sequence[QuantizedLinear]) -> None:
        self.parts, self.in_features = list(parts), parts[0].in_features
        self._chains: dict[int, list[LinearArgs]] = {}
        self.out_features = sum(part.out_features for part in parts)

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        path: int = 0,
        workspace: huge_pages.Workspace | None = None,
    ) -> torch.Tensor:
        """Multiply as `QuantizedLinear` does, for rows `[T, k]`."""
        shape, start = (len(x), self.out_features), 0
        out = torch.empty(shape, dtype=dtype) if workspace is None else workspace.take(*shape)
        for part in self.parts:
            part(x, dtype, path, out=out[:, start : start + part.out_features])
            start += part.out_features
        return out

    def args(self, path: int = 0) -> LinearArgs:
        """Return the C struct of the first part, which refers to the others. This object must outlive it."""
        if path not in self._chains:
            chain = self._chains[path] = []
            for part in reversed(self.parts):
                chain.append(part.args(path, chain[-1] if chain else None))
        return self._chains[path][-1]


def _integers(bits: int) -> QuantKind:
    if bits not in _INTEGERS:
        raise ValueError(f"weights of {bits} bits are not supported, only of 4 and 8")
    return _INTEGERS[bits]


def _type_of_scales(scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.dtype:
    """Return float16, which has more digits, unless it would lose large numbers, or small ones of another type."""
    sizes = scales.float().abs()
    largest = sizes.max() if offsets is None else torch.maximum(sizes.max(), offsets.abs().max())
    small = scales.dtype != torch.float16 and bool(((sizes > 0) & (sizes < 2**-14)).any())
    return torch.bfloat16 if small or largest > 65504 else torch.float16


def _packed_bias(bias: torch.Tensor, columns: int, gated: bool) -> torch.Tensor:
    """Return the bias in float32, padded; if `gated` in the packed order: 16 of the gate, 16 of up, and so on."""
    if not gated:
        return torch.nn.functional.pad(bias.float(), (0, columns - len(bias)))
    halves = bias.float().view(2, -1)
    halves = torch.nn.functional.pad(halves, (0, columns // 2 - halves.shape[1]))
    return halves.view(2, -1, 16).transpose(0, 1).reshape(-1).contiguous()
