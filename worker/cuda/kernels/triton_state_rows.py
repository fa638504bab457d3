"""Computes, in Triton, the rows of a step for mixers with a recurrent state: one launch each, a program per row
or head, so that a row has the same bits in any batch. The torch twins are `Ops.delta_inputs`, `Ops.gated_norm`,
`Ops.state_norm`, `Ops.l2_norm` and `Ops.square_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.layers.states.delta_rule import DeltaHeads

_SQUARES, _RMS, _LENGTH = range(3)
_LENGTH_EPS = 1e-6  # of `rowwise.l2_norm`


def delta_inputs(
    x: torch.Tensor, gates: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `delta_rule.delta_inputs`."""
    tokens, num_k, num_v = len(x), heads.num_k, heads.num_v
    qk, g, beta = (x.new_empty(tokens, *shape) for shape in ((2 * num_k, heads.k_dim), (num_v, 1), (num_v,)))
    _delta_kernel[(tokens, 2 * num_k + 1)](
        x, gates, A_log, dt_bias, qk, g, beta, x.stride(0), gates.stride(0), heads.k_dim**-0.5, heads.strength,
        NUM_K=num_k, K_DIM=heads.k_dim, BLOCK_K=triton.next_power_of_2(heads.k_dim), NUM_V=num_v,
        BLOCK_V=triton.next_power_of_2(num_v), EPS=_LENGTH_EPS, num_warps=1,
    )  # fmt: skip
    q, k = qk.split(num_k, 1)
    if heads.tiled:
        q, k = (part.repeat(1, num_v // num_k, 1) for part in (q, k))
    return q, k, g, beta


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `delta_rule.gated_norm`."""
    (tokens, heads, size), x = x.shape, x.contiguous()
    out = z.new_empty(tokens, heads * size)
    _gated_norm_kernel[(tokens, heads)](
        x, z, weight, out, z.stride(0), heads, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out


def state_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `Ops.state_norm`."""
    return _rows(x, weight, torch.empty(x.shape, dtype=x.dtype, device=x.device), eps, _RMS)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """See `Ops.l2_norm`."""
    return _rows(x, None, torch.empty(x.shape, dtype=x.dtype, device=x.device), _LENGTH_EPS, _LENGTH)


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """See `Ops.square_sums`."""
    return _rows(x, None, x.new_empty(*x.shape[:-1], 1), 0.0, _SQUARES)


def _rows(x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor, eps: float, mode: int) -> torch.Tensor:
    x, size = x.contiguous(), x.shape[-1]
    block = triton.next_power_of_2(size)
    _rows_kernel[(x.numel() // size,)](
        x, weight, out, eps, SIZE=size, BLOCK=block, MODE=mode, num_warps=min(16, max(1, block // 512))
    )
    return out


@triton.jit
def _rows_kernel(
    x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * SIZE + column, inside, 0.0).to(tl.float32)
    total = tl.sum(value * value, 0)
    if MODE == 0:
        tl.store(out + row, total)
    else:
        mean = total / SIZE if MODE == 1 else total
        value = value * tl.rsqrt(mean + eps)
        if weight is not None:
            value *= tl.load(weight + column, inside, 0.0).to(tl.float32)
        tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def _delta_kernel(
    x, gates, rates, bias, qk, g, beta, x_stride, gates_stride, scale, strength, NUM_K: tl.constexpr,
    K_DIM: tl.constexpr, BLOCK_K: tl.constexpr, NUM_V: tl.constexpr, BLOCK_V: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise one head of q or k; the last program of a token computes its gates."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < 2 * NUM_K:
        column = tl.arange(0, BLOCK_K)
        inside = column < K_DIM
        value = tl.load(x + token * x_stride + head * K_DIM + column, inside, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value, 0) + EPS) * tl.where(head < NUM_K, scale, 1.0)
        tl.store(qk + (token * 2 * NUM_K + head) * K_DIM + column, value, inside)
    else:
        lane = tl.arange(0, BLOCK_V)
        exists = lane < NUM_V
        own = gates + token * gates_stride + lane
        strong = 1.0 / (1.0 + tl.exp(-tl.load(own, exists, 0.0)))
        tl.store(beta + token * NUM_V + lane, strong * strength, exists)
        time = tl.load(own + NUM_V, exists, 0.0) + tl.load(bias + lane, exists, 0.0)
        # log(1 + u), exact for small u, too
        u = tl.exp(tl.minimum(time, 20.0))
        more = 1.0 + u
        log = tl.where(more == 1.0, u, tl.log(more) * (u / tl.where(more == 1.0, 1.0, more - 1.0)))
        step = tl.where(time > 20.0, time, log)
        tl.store(g + token * NUM_V + lane, -tl.exp(tl.load(rates + lane, exists, 0.0)) * step, exists)


@triton.jit
def _gated_norm_kernel(
    x, z, weight, out, z_stride, heads, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + (token * heads + head) * SIZE + column, inside, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * tl.load(weight + column, inside, 0.0)
    gate = tl.load(z + token * z_stride + head * SIZE + column, inside, 0.0).to(tl.float32)
    value = value * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + (token * heads + head) * SIZE + column, value.to(out.dtype.element_ty), inside)
