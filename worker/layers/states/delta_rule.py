"""The gated delta rule (https://arxiv.org/abs/2412.06464): Gated DeltaNet and, with a decay per channel, Kimi Delta
Attention (https://arxiv.org/abs/2510.26692).

Shapes, of one layer: H value heads, Dk and Dv entries of keys and values. A state `[H, Dk, Dv]` maps keys to values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.layers.norm import rms_norm
from quire.worker.layers.rowwise import l2_norm, sigmoid, silu, softplus
from quire.worker.layers.state import StateStep, by_stages

CHUNK = 64  # tokens whose update of the state is one matrix product
CHUNK_PER_CHANNEL = 16  # the same if each channel of a key has its decay: takes memory for each pair of tokens


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta net. `tiled`: key heads are repeated one after another as a whole, else key head i
    belongs to consecutive value heads. `strength` is the largest beta.
    """

    num_k: int
    k_dim: int
    num_v: int
    tiled: bool
    strength: float


def delta_inputs(
    x: torch.Tensor, gates: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, g and beta of `gated_delta_rule`: of x `[T, ..]`, which begins with q and k, and gates `[T, 2 H]`,
    those of beta and of the decay; all float32.
    """
    keys = heads.num_k * heads.k_dim
    q, k = (l2_norm(part.unflatten(-1, (heads.num_k, heads.k_dim))) for part in x[:, : 2 * keys].split(keys, -1))
    beta, a = gates.chunk(2, -1)
    g = -A_log.exp() * softplus(a + dt_bias)
    if heads.tiled:
        q, k = (part.repeat(1, heads.num_v // heads.num_k, 1) for part in (q, k))
    return q * heads.k_dim**-0.5, k, g[..., None], sigmoid(beta) * heads.strength


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return heads of x `[T, H, D]` float32, scaled to root mean square 1, times weight `[D]` and silu(z), z `[T, H
    D]`. Returns `[T, H D]` in the dtype of z.
    """
    normed = rms_norm(x, weight, eps) * silu(z.float()).view_as(x)
    return normed.flatten(1).to(z.dtype)


def delta_one(
    states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S = e^g S; S += k (x) beta (v - k S); o = q S, for one token of R requests: q, k `[R, H, Dk]`, v `[R, H,
    Dv]`, g `[R, H, Dk]` or `[R, H, 1]`, beta `[R, H]`, states `[R, H, Dk, Dv]`.
    """
    states = states * g.exp()[..., None]
    delta = (v - torch.einsum("rhk,rhkv->rhv", k, states)) * beta[..., None]
    states = states + k[..., None] * delta[..., None, :]
    return torch.einsum("rhk,rhkv->rhv", q, states), states


def delta_many(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `delta_one` for the n tokens of one request, one after another: q, k `[n, H, Dk]` and so on, state `[H,
    Dk, Dv]`.

    Within a chunk the tokens' corrections d = beta (v - k S) depend on each other: with the decay D_ij from token j to
    token i, (I + tril(beta k_i D_ij k_j, -1)) d = beta (v - k e^G S0), a triangular system.
    """
    outputs, size = [], CHUNK if g.shape[-1] == 1 else CHUNK_PER_CHANNEL
    # [n, H, ..] to [H, n, ..]
    q, k, v, g = (x.transpose(0, 1) for x in (q, k, v, g))
    beta = beta.t()[..., None]
    for start in range(0, q.shape[1], size):
        at = slice(start, start + size)
        out, state = _chunk(state, q[:, at], k[:, at], v[:, at], g[:, at].cumsum(1), beta[:, at])
        outputs.append(out)
    return torch.cat(outputs, 1).transpose(0, 1), state


def _chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one chunk of `delta_many`: q, k `[H, c, Dk]`, v `[H, c, Dv]`, decay `[H, c, Dk]` or `[H, c, 1]`, the sum
    of g up to each token, beta `[H, c, 1]`.
    """
    since = decay.exp()  # from before the chunk
    kk, qk = _pairs(k, k, decay), _pairs(q, k, decay)
    system = (beta * kk).tril(-1)
    target = beta * (v - (k * since) @ state)
    delta = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = (q * since) @ state + qk.tril() @ delta
    until = (decay[:, -1:] - decay).exp()  # to the end of the chunk
    state = since[:, -1, :, None] * state + (k * until).transpose(1, 2) @ delta
    return out, state


def _pairs(a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Return a_i D_ij b_j for all i >= j, `[H, c, c]`; 0 or any finite number for the others."""
    if decay.shape[-1] == 1:
        between = (decay - decay.transpose(1, 2)).clamp(max=0.0)
        return (a @ b.transpose(1, 2)) * between.exp()
    between = (decay[:, :, None] - decay[:, None]).clamp(max=0.0).exp()  # [H, c, c, Dk]
    return torch.einsum("hik,hjk,hijk->hij", a, b, between)


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
    """Pass a step's tokens through the states in `pages` `[P, H, Dk, Dv]`; all float32.

    q and k are `[T, Hk, Dk]`, normalised, each for H / Hk consecutive value heads; v is `[T, H, Dv]`; g, the logarithm
    of the decay, `[T, H, 1]` or `[T, H, Dk]`; beta `[T, H]`. Returns `[T, H, Dv]`.
    """
    repeats = v.shape[1] // q.shape[1]
    if repeats > 1:
        q, k = (x.repeat_interleave(repeats, 1, output_size=v.shape[1]) for x in (q, k))
    return step.advance(pages, delta_one, delta_many, q, k, v, g, beta)
