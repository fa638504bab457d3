"""argmax of the output head that reads little more than 8 bits of each weight."""

from __future__ import annotations

from ctypes import byref

import torch

from quire.worker.cpu.native import KERNELS, ScreenArgs
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from quire.worker.cpu.ops import has_amx
from quire.worker.host import huge_pages


class Int8ArgmaxPrefilter:
    """A copy of a `PackedLinear`'s weight, rounded to 8 bits, that rules out most outputs as the largest
    (csrc/greedy.cpp). The linear must outlive it.

    If the norms bound the outputs so loosely that many candidates remain, the filter costs more than it saves: it then
    pauses for 64 calls, and the caller computes all outputs with the linear.
    """

    MIN_WEIGHTS = 1 << 24  # a smaller weight fits in the caches
    MAX_ROWS = 32
    # Maximum fraction of outputs to compute before a pause. For several rows few of them take part in each block; AMX
    # computes all rows at once.
    _MOST, _MOST_OF_ROWS = 1 / 4, 3 / 4
    _FEW_ROWS = 4
    _PAUSE = 64  # calls

    min_rows = 1

    def __init__(self, linear: PackedLinear) -> None:
        self.linear, self.lib = linear.args(), KERNELS.lib
        self.data = huge_pages.zeros(linear.columns * self.linear.k, dtype=torch.int8)
        self.columns = torch.empty(linear.columns // 32, 3, 32)
        self.args = ScreenArgs(self.data.data_ptr(), self.columns.data_ptr(), self.linear.k // 64)
        self.finite = self.lib.quire_screen_make(
            self.linear.packed, self.linear.compact, byref(self.args), self.linear.n, self.linear.k
        )
        self.computed = self._pause = 0  # computed: number of blocks of 32 outputs, in the last call

    @classmethod
    def from_linear(cls, linear: PackedLinear) -> Int8ArgmaxPrefilter | None:
        """Return the prefilter of `linear`, or None if its weight is unsupported or too small to benefit."""
        n, k = linear.out_features, linear.in_features
        if k % 64 or n * k < cls.MIN_WEIGHTS or linear.bias is not None or linear.flags:
            return None
        screen = cls(linear)
        return screen if screen.finite else None

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the argmax (first of equals), int64 `[T]`, of the linear's float32 outputs for each row of x `[T, k]`
        bfloat16.

        Returns None if the caller must compute the outputs: x has less than `min_rows` or more than MAX_ROWS rows, an
        output is not finite, or the filter is paused.
        """
        if not self.min_rows <= len(x) <= self.MAX_ROWS or self._pause > 0:
            self._pause = max(self._pause - 1, 0)
            return None
        assert x.dtype == torch.bfloat16 and x.stride(1) == 1
        ids = torch.empty(len(x), dtype=torch.int64)
        self.computed = self.lib.quire_greedy(
            x.data_ptr(),
            x.stride(0),
            self.linear.packed,
            self.linear.compact,
            self.linear.quant,
            byref(self.args),
            ids.data_ptr(),
            len(x),
            self.linear.n,
            self.linear.k,
        )
        most = self._MOST if len(x) <= self._FEW_ROWS or has_amx() else self._MOST_OF_ROWS
        if self.computed > len(self.columns) * most:
            self._pause = self._PAUSE
        return None if self.computed < 0 else ids


class BytesArgmaxPrefilter(Int8ArgmaxPrefilter):
    """The prefilter of a `QuantizedLinear` of 8 bits per value, without a copy: from `min_rows` rows on, products with
    8 of the 16 bits of the inputs rule out most outputs in half the time.
    """

    min_rows = 3

    def __init__(self, linear: QuantizedLinear) -> None:
        self.linear, self.lib = linear.args(), KERNELS.lib
        self.data = self.columns = torch.empty(linear.columns // 32, 3, 32)
        self.args = ScreenArgs(None, self.columns.data_ptr(), self.linear.k // 64)
        self.finite = self.lib.quire_screen_measure(self.linear.quant, byref(self.args), self.linear.n)
        self.computed = self._pause = 0

    @classmethod
    def from_linear(cls, linear: QuantizedLinear) -> BytesArgmaxPrefilter | None:
        """Return the prefilter of `linear`, or None if its weight is unsupported or the CPU multiplies no bytes."""
        n, k = linear.out_features, linear.in_features
        if k % 64 or n * k < cls.MIN_WEIGHTS or linear.bias is not None or linear.flags or not linear.is_bytes:
            return None
        screen = cls(linear)
        return screen if screen.finite else None
