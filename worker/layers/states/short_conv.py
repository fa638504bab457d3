"""A causal convolution per channel, whose state is its last inputs: the short convolution of LFM2, and the first part
of most other mixers with a state.

Shapes: C channels, K the width. A state `[K - 1, C]` holds the inputs before the next one, oldest first.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from quire.worker.layers.state import StateStep, by_stages


def conv_one(
    weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, x: torch.Tensor, apart: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y[c] = bias[c] + sum_k weight[k, c] * input[k, c] over the last K inputs that are `apart` tokens apart,
    the newest of which is x `[R, C]`; with states `[R, (K - 1) * apart, C]`.
    """
    window = torch.cat([states, x[:, None]], 1)
    y = (window[:, ::apart] * weight).sum(1)
    return (y if bias is None else y + bias), window[:, 1:]


def conv_many(
    weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, x: torch.Tensor, apart: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `conv_one` for the n tokens x `[n, C]` of one request, one after another."""
    n, inputs = len(x), torch.cat([state, x])
    y = inputs[:n] * weight[0]
    for k in range(1, len(weight)):
        y.addcmul_(inputs[k * apart : k * apart + n], weight[k])
    return (y if bias is None else y.add_(bias)), inputs[n:]


@by_stages(0)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    step: StateStep,
    silu: bool = False,
) -> torch.Tensor:
    """Convolve x `[T, C]` over the tokens of each request, and keep its last inputs in `pages` `[P, K - 1, C]`.

    weight is `[K, C]` float32, bias `[C]`; with `silu` that activation follows. Returns float32 `[T, C]`.
    """
    y = step.advance(pages, partial(conv_one, weight, bias), partial(conv_many, weight, bias), x.float())
    return F.silu(y) if silu else y


@by_stages(0)
def spaced_conv(
    x: torch.Tensor, weight: torch.Tensor, pages: torch.Tensor, step: StateStep, apart: int
) -> torch.Tensor:
    """Convolve as `causal_conv` does inputs that are `apart` tokens apart; pages are `[P, (K - 1) * apart, C]`."""
    one, many = partial(conv_one, weight, None, apart=apart), partial(conv_many, weight, None, apart=apart)
    return step.advance(pages, one, many, x.float())


@by_stages(0, 1)
def own_conv(
    x: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, pages: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Convolve as `causal_conv` does, with the weights `[K, C]` of all tokens and `taps` `[T, heads, K]` of each, which
    are added in all channels of a head; both begin with the newest input.
    """
    oldest_first = weight.flip(0)
    return step.advance(pages, partial(_own_one, oldest_first), partial(_own_many, oldest_first), x.float(), taps)


def _own_one(
    weight: torch.Tensor, states: torch.Tensor, x: torch.Tensor, taps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.cat([states, x[:, None]], 1)
    return _weighted(weight, window, taps), window[:, 1:]


def _own_many(
    weight: torch.Tensor, state: torch.Tensor, x: torch.Tensor, taps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.cat([state, x])
    return _weighted(weight, inputs.unfold(0, len(weight), 1).transpose(1, 2), taps), inputs[len(x) :]


def _weighted(weight: torch.Tensor, window: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return the sum over the inputs of each token, `[n, K, C]`."""
    own = (window.unflatten(-1, (taps.shape[1], -1)) * taps.flip(-1).transpose(1, 2)[..., None]).sum(1)
    return (window * weight).sum(1) + own.flatten(1)
