"""Linear attention with a decay per head: the state space layer of Mamba 2 (https://arxiv.org/abs/2405.21060) and
lightning attention (https://arxiv.org/abs/2401.04658).

Shapes, of one layer: H heads, Dk and Dv entries of keys and values. A state `[H, Dk, Dv]` maps keys to values.
"""

from __future__ import annotations

import torch

from quire.worker.layers.state import StateStep, by_stages

CHUNK = 64  # tokens whose update of the state is one matrix product


def linear_one(
    states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S = e^g S + k (x) v; o = q S, for one token of R requests: q, k `[R, H, Dk]`, v `[R, H, Dv]`, g `[R, H]`,
    states `[R, H, Dk, Dv]`.
    """
    states = states * g.exp()[..., None, None] + k[..., None] * v[..., None, :]
    return torch.einsum("rhk,rhkv->rhv", q, states), states


def linear_many(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `linear_one` for the n tokens of one request, one after another: q, k `[n, H, Dk]` and so on."""
    outputs = []
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    for start in range(0, q.shape[1], CHUNK):
        at = slice(start, start + CHUNK)
        decay = g[at].t().cumsum(1)[..., None]  # [H, c, 1], since the beginning of the chunk
        since, between = decay.exp(), (decay - decay.transpose(1, 2)).clamp(max=0.0).exp()
        scores = ((q[:, at] @ k[:, at].transpose(1, 2)) * between).tril()
        outputs.append((q[:, at] * since) @ state + scores @ v[:, at])
        until = (decay[:, -1:] - decay).exp()
        state = since[:, -1:] * state + (k[:, at] * until).transpose(1, 2) @ v[:, at]
    return torch.cat(outputs, 1).transpose(0, 1), state


@by_stages(0, 1, 2, 3, like=2)
def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, pages: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Pass a step's tokens through the states in `pages` `[P, H, Dk, Dv]`; all float32.

    q and k are `[T, G, Dk]`, each for H / G consecutive heads; v is `[T, H, Dv]`; g, the logarithm of the decay,
    `[T, H]`. Returns `[T, H, Dv]`.
    """
    repeats = v.shape[1] // q.shape[1]
    if repeats > 1:
        q, k = (x.repeat_interleave(repeats, 1, output_size=v.shape[1]) for x in (q, k))
    return step.advance(pages, linear_one, linear_many, q, k, v, g)
