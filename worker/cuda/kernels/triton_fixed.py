"""Products whose sums have one order in Triton, for `--deterministic`: tiles of one size for any number of rows, each
of which sums over all columns, in order. A row's result then has the same bits in any batch; libraries choose tiles and
splits by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 64  # of a tile: the rows of Hopper's products, also for a single row of the batch


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `F.linear` of x `[T, K]`, `weight` `[N, K]` and `bias` `[N]`."""
    return _launch(x[:, None], weight[None], bias)[:, 0]


def multiply_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `mla.multiply_heads`."""
    return _launch(x, weights, None)


def _launch(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x `[T, H, K]` times the transposed weights `[H, N, K]`: `[T, H, N]`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    (num_rows, heads, depth), size = x.shape, weights.shape[1]
    out = x.new_empty(num_rows, heads, size)
    _fixed_kernel[(triton.cdiv(size, COLUMNS), triton.cdiv(num_rows, ROWS), heads)](
        x, weights, bias, out, num_rows, size, depth, x.stride(0), x.stride(1), *weights.stride(), *out.stride()[:2],
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=128 // x.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


# strides of a single row are arbitrary; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_rows", "x_head_stride", "out_head_stride"])
def _fixed_kernel(
    x, weights, bias, out, num_rows, size, depth, x_stride, x_head_stride, weight_head_stride, weight_stride,
    depth_stride, out_stride, out_head_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(2)
    there, inside = rows < num_rows, columns < size
    x_at = x + head * x_head_stride + rows[:, None] * x_stride
    weight_at = weights + head * weight_head_stride + columns.to(tl.int64)[None, :] * weight_stride
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(x_at + k[None, :], mask=there[:, None] & (k < depth)[None, :], other=0.0)
        b = tl.load(weight_at + k[:, None] * depth_stride, mask=(k < depth)[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out + head * out_head_stride + rows[:, None] * out_stride + columns[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
