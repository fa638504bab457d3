"""A Triton kernel that excludes the tokens that grammars do not allow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # tokens of a program


@triton.jit
def _exclude_kernel(logits, rows, masks, logits_stride, masks_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < SIZE
    words = tl.load(masks + i.to(tl.int64) * masks_stride + tokens // 32, mask=inside, other=-1)
    excluded = inside & (((words >> (tokens % 32)) & 1) == 0)
    row = tl.load(rows + i)
    tl.store(logits + row * logits_stride + tokens, float("-inf"), mask=excluded)


def exclude_by_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """See `Ops.exclude_by_bitmask`."""
    size = logits.shape[1]
    grid = (len(rows), triton.cdiv(size, _BLOCK))
    _exclude_kernel[grid](logits, rows, masks, logits.stride(0), masks.stride(0), SIZE=size, BLOCK=_BLOCK)
