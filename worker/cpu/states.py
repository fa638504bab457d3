"""Recurrent states on the native kernels; the twins are in `worker/layers/` under the same names."""

from __future__ import annotations

import torch

from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.ops import DTYPES
from quire.worker.layers.state import StateStep, by_stages
from quire.worker.layers.states import delta_rule, linear_attention, short_conv
from quire.worker.layers.states.delta_rule import DeltaHeads
from quire.worker.platforms.ops import Ops

_WIDEST, _MOST = 16, 1024  # of convolutions; entries of keys and values


def reason(shapes: tuple[tuple[int, ...], ...]) -> str | None:
    """Return why the twins must compute a layer with states of these shapes, or None."""
    width = max((shape[0] + 1 for shape in shapes[:1] if len(shape) == 2), default=0)
    size = max((max(shape[1:]) for shape in shapes if len(shape) == 3), default=0)
    if width > _WIDEST or size > _MOST:
        return f"a convolution of {width} tokens or heads of {size} entries exceed {_WIDEST} and {_MOST}"
    return None


@by_stages(0)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    step: StateStep,
    silu: bool = False,
) -> torch.Tensor:
    """See `short_conv.causal_conv`."""
    if len(weight) > _WIDEST:
        return short_conv.causal_conv(x, weight, bias, pages, step, silu)
    narrow = x.dtype == torch.bfloat16
    x = (x if x.stride(1) == 1 else x.contiguous()) if narrow else _rows(x.float())
    out = torch.empty(x.shape)
    KERNELS.lib.quire_causal_conv(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *_step(pages, step),
        x.shape[1],
        len(weight),
        silu,
        out.data_ptr(),
        narrow,
    )
    return out


@by_stages(0, 1, 2, 3, 4, like=2)
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pages: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """See `delta_rule.gated_delta_rule`."""
    if max(q.shape[2], v.shape[2]) > _MOST:
        return delta_rule.gated_delta_rule(q, k, v, g, beta, pages, step)
    q, k, g, beta, v = q.contiguous(), k.contiguous(), g.contiguous(), beta.contiguous(), _rows(v)
    out = torch.empty(v.shape)
    KERNELS.lib.quire_delta_rule(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        v.stride(0),
        g.data_ptr(),
        beta.data_ptr(),
        *_step(pages, step),
        v.shape[1],
        *q.shape[1:],
        v.shape[2],
        g.shape[2],
        out.data_ptr(),
    )
    return out


def delta_inputs(
    x: torch.Tensor, gates: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `delta_rule.delta_inputs`."""
    x, gates, times = _rows(x), gates.contiguous(), heads.num_v // heads.num_k if heads.tiled else 1
    q, k = torch.empty(2, len(x), times * heads.num_k, heads.k_dim)
    g, beta = torch.empty(2, len(x), heads.num_v)
    KERNELS.lib.quire_delta_inputs(
        x.data_ptr(),
        x.stride(0),
        gates.data_ptr(),
        A_log.data_ptr(),
        dt_bias.data_ptr(),
        len(x),
        heads.num_k,
        heads.k_dim,
        heads.num_v,
        times,
        heads.k_dim**-0.5,
        heads.strength,
        q.data_ptr(),
        k.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
    )
    return q, k, g[..., None], beta


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `delta_rule.gated_norm`."""
    if z.dtype not in DTYPES:
        return delta_rule.gated_norm(x, z, weight, eps)
    x, z = x.contiguous(), z if z.stride(1) == 1 else z.contiguous()
    out = torch.empty(len(x), x.shape[1] * x.shape[2], dtype=z.dtype)
    KERNELS.lib.quire_gated_norm(
        x.data_ptr(),
        z.data_ptr(),
        z.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        eps,
        DTYPES[z.dtype],
    )
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `Ops.sigmoid_gate`; x may be overwritten."""
    if x.dtype != torch.bfloat16 or gate.stride(1) != 1:
        return Ops.sigmoid_gate(x, gate)
    x = x.contiguous()
    KERNELS.lib.quire_sigmoid_gate(x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), *x.shape)
    return x


@by_stages(0, 1, 2, 3, like=2)
def scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, pages: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """See `linear_attention.linear_attention`."""
    if max(q.shape[2], v.shape[2]) > _MOST:
        return linear_attention.linear_attention(q, k, v, g, pages, step)
    q, k, v, g = _rows(q), _rows(k), v.contiguous(), g.contiguous()
    out = torch.empty(v.shape)
    KERNELS.lib.quire_linear_attention(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        g.data_ptr(),
        *_step(pages, step),
        v.shape[1],
        *q.shape[1:],
        v.shape[2],
        out.data_ptr(),
    )
    return out


@by_stages(0, 1, 3, 4)
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pages: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """See `selective_scan.selective_scan`."""
    x, dt, a, b, c = x.contiguous(), dt.contiguous(), a.contiguous(), _rows(b), _rows(c)
    out = torch.empty(x.shape)
    KERNELS.lib.quire_selective_scan(
        x.data_ptr(),
        dt.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        b.stride(0),
        c.data_ptr(),
        c.stride(0),
        *_step(pages, step),
        *a.shape,
        out.data_ptr(),
    )
    return out


def float_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `selective_scan.float_linear`; the rows of the result are independent of each other, bit for bit."""
    if weight.shape[1] % 16:
        return (x[:, :, None] * weight).sum(1) + bias
    x, weight, out = _rows(x), weight.contiguous(), torch.empty(len(x), weight.shape[1])
    sizes = len(x), *weight.shape
    KERNELS.lib.quire_float_linear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), bias.data_ptr(), *sizes, out.data_ptr()
    )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x `[T, ..]` with contiguous rows, in float32."""
    assert x.dtype == torch.float32
    return x if x[:1].is_contiguous() else x.contiguous()


def _step(pages: torch.Tensor, step: StateStep) -> tuple[int, ...]:
    """Return the arguments of the kernels for the pages and requests of a step."""
    return (address(pages), *step_args(step))


def address(pages: torch.Tensor) -> int:
    """Return the address of the pages of a state."""
    assert pages.is_contiguous() and pages.dtype == torch.float32
    return pages.data_ptr()


def step_args(step: StateStep) -> tuple[int, ...]:
    """Return the arguments of the kernels for the requests of a step."""
    tensors = step.read, step.write, step.fresh, step.starts
    assert step.starts.dtype == torch.int32 and all(tensor.is_contiguous() for tensor in tensors)
    return (*(tensor.data_ptr() for tensor in tensors), len(step.read))
