"""The selective scan of Mamba 1 (https://arxiv.org/abs/2312.00752): a decay per channel and entry of the state.

Shapes: I channels, N entries of a channel's state; a state is `[I, N]`.
"""

from __future__ import annotations

from functools import partial

import torch

from quire.worker.layers.state import StateStep, by_stages

CHUNK = 64  # tokens of a parallel scan


def float_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x `[T, K]` times weight `[K, N]` plus bias, in float32: the projection of the time step."""
    return torch.addmm(bias, x, weight)


def scan_one(
    a: torch.Tensor, states: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h = e^(dt a) h + dt x b; y = h c, for one token of R requests: x, dt `[R, I]`, b, c `[R, N]`, a `[I, N]`.
    """
    states = (dt[..., None] * a).exp() * states + (dt * x)[..., None] * b[:, None]
    return torch.einsum("rin,rn->ri", states, c), states


def scan_many(
    a: torch.Tensor, state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `scan_one` for the n tokens of one request, one after another: x, dt `[n, I]`, b, c `[n, N]`.

    In a chunk the maps h -> decay h + input of neighbouring tokens are joined, then those of pairs, and so on.
    """
    outputs = []
    for start in range(0, len(x), CHUNK):
        at = slice(start, start + CHUNK)
        decay = (dt[at, :, None] * a).exp()  # [c, I, N]
        states = (dt[at] * x[at])[..., None] * b[at, None]
        states[0] += decay[0] * state
        shift = 1
        while shift < len(states):
            states = torch.cat([states[:shift], states[shift:] + decay[shift:] * states[:-shift]])
            decay = torch.cat([decay[:shift], decay[shift:] * decay[:-shift]])
            shift *= 2
        outputs.append(torch.einsum("tin,tn->ti", states, c[at]))
        state = states[-1]
    return torch.cat(outputs), state


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
    """Pass a step's tokens through the states in `pages` `[P, I, N]`; all float32: x, dt `[T, I]`, b, c `[T, N]`,
    a `[I, N]`. Returns `[T, I]`.
    """
    return step.advance(pages, partial(scan_one, a), partial(scan_many, a), x, dt, b, c)
