"""Two causal convolutions, one after the other: of each channel, then of all channels of a head (ZAYA's compressed
convolutional attention, https://arxiv.org/abs/2510.04476). Other channels are delayed by one token.

Shapes: C convolved channels, in heads of D; V delayed ones. A state `[K - 1, C + V]` holds the inputs before the next
one, oldest first, where K - 1 is the sum of both widths less 2. Before the first token they are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from quire.worker.layers.state import StateStep, by_stages


@dataclass(frozen=True, slots=True)
class HeadConv:
    """`narrow` is `[width, C]`, `wide` `[heads, D, D, width]` (to, from), biases `[C]`, all float32."""

    narrow: torch.Tensor
    narrow_bias: torch.Tensor
    wide: torch.Tensor
    wide_bias: torch.Tensor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs `[B, K - 1 + n, C + V]` to results `[B, n, C + V]`."""
        width, heads = len(self.narrow), self.wide.shape[0]
        kept = width + self.wide.shape[-1] - 2
        n = inputs.shape[1] - kept
        x, delayed = inputs.tensor_split([self.narrow.shape[1]], -1)
        first = self.narrow_bias + sum(x[:, k : n + kept - width + 1 + k] * self.narrow[k] for k in range(width))
        first = first.unflatten(-1, (heads, -1))
        taps = range(self.wide.shape[-1])
        y = sum(torch.einsum("bnhd,hed->bnhe", first[:, k : k + n], self.wide[..., k]) for k in taps)
        return torch.cat([y.flatten(2) + self.wide_bias, delayed[:, kept - 1 : kept - 1 + n]], -1)


@by_stages(0)
def head_conv(x: torch.Tensor, conv: HeadConv, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Convolve x `[T, C + V]` over the tokens of each request, and keep its last inputs in `pages` `[P, K - 1, C + V]`.
    Returns float32 `[T, C + V]`.
    """
    return step.advance(pages, partial(_one, conv), partial(_many, conv), x.float())


def _one(conv: HeadConv, states: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.cat([states, x[:, None]], 1)
    return conv(inputs)[:, 0], inputs[:, 1:]


def _many(conv: HeadConv, state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.cat([state, x])
    return conv(inputs[None])[0], inputs[len(x) :]
