"""Weights in oneDNN's own layout, for 16-bit products on a CPU that multiplies them by instructions.

`F.linear` arranges a weight for every product, which takes up to half of one with few rows. An arranged weight gives
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quire.worker.host import resources as host

_SPARE = 0.5  # share of the machine's memory that arranged weights leave available
_ROWS = 32  # of a product, for which oneDNN chooses the layout; others may have any number


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of `dtype` by instructions of this CPU.

    If it does not, its products with AVX-512, and torch's own loops, take up to five times as long as float32's.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    converts = torch.backends.cpu.get_cpu_capability().startswith("AVX") and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not converts


@dataclass(frozen=True, slots=True)
class Arranged:
    """A copy of a weight `[out_features, in_features]`."""

    weight: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Arranged | None:
        """Arrange `weight`, or return None if that saves no time here or the machine lacks memory to spare."""
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _takes_arranged():
            return None
        total, available = host.memory()
        if available - weight.nbytes < _SPARE * total:
            return None
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x `[T, in_features]` times the weight, plus `bias`."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")


@cache
def _takes_arranged() -> bool:
    """Return whether oneDNN has x86's instructions for bfloat16; elsewhere no time was measured."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and multiplies(torch.bfloat16)
