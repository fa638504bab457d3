"""Weighted means over windows of tokens, from which compressed keys are made (DeepSeek V4): each channel of a window
has a softmax of its own over the tokens.

Shapes: C channels, S series per token. With one series, the mean of a window is over its `rate` tokens. With two, it is
over the second series of its tokens and the first one of the tokens of the window before. A state `[S, 3, C]` holds the
running maximum of the logits, the sum of the weights and the weighted sum: of the mean of the next window (if S is 2),
and of the window of the last token.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from quire.worker.layers.state import StateStep, by_stages

Sums = torch.Tensor  # [.., 3, C]: maximum, weights and weighted sum


def _merged(one: Sums, other: Sums) -> Sums:
    """Return the sums over both sets of tokens, of which one may be empty (its maximum is -inf)."""
    most = torch.maximum(one[..., 0, :], other[..., 0, :])
    first, second = (sums[..., 1:, :] * (sums[..., :1, :] - most[..., None, :]).exp() for sums in (one, other))
    return torch.cat([most[..., None, :], first + second], -2)


def _empty(like: Sums) -> Sums:
    sums = torch.zeros_like(like)
    sums[..., 0, :] = -torch.inf
    return sums


def compress_one(
    rate: int, states: torch.Tensor, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means `[R, C]` of the windows of one token of R requests: kv and gate `[R, S, C]`, positions `[R]`,
    states `[R, S, 3, C]`.
    """
    begins = (positions % rate == 0)[:, None, None]
    current = states[:, -1]
    own = torch.stack([gate, torch.ones_like(gate), kv], 2)
    if kv.shape[1] == 1:
        merged = _merged(torch.where(begins, _empty(current), current), own[:, 0])[:, None]
    else:
        following = states[:, 0]
        before = torch.where((positions >= rate)[:, None, None], following, _empty(following))
        merged = torch.stack(
            [
                _merged(torch.where(begins, _empty(following), following), own[:, 0]),
                _merged(torch.where(begins, before, current), own[:, 1]),
            ],
            1,
        )
    return merged[:, -1, 2] / merged[:, -1, 1], merged


def compress_many(
    rate: int, state: torch.Tensor, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `compress_one` for the n tokens of one request, one after another: kv and gate `[n, S, C]` and so on. A
    mean is that of the whole window, or of its tokens so far if they end in it.
    """
    first, number = int(positions[0]), len(kv)
    offset = first % rate
    windows = -(-(offset + number) // rate)
    pad = (0, 0, 0, 0, offset, windows * rate - offset - number)
    kv = F.pad(kv, pad).unflatten(0, (windows, rate))
    gate = F.pad(gate, pad, value=-torch.inf).unflatten(0, (windows, rate))
    most = gate.amax(1)  # [W, S, C]
    weights = (gate - most[:, None]).exp()
    sums = torch.stack([most, weights.sum(1), (weights * kv).sum(1)], 2)  # [W, S, 3, C]
    if offset:
        sums[0] = _merged(state, sums[0])
    elif first and len(state) == 2:
        sums[0, 1] = _merged(state[0], sums[0, 1])
    if len(state) == 2:
        sums[1:, 1] = _merged(sums[:-1, 0], sums[1:, 1])
    means = sums[:, -1, 2] / sums[:, -1, 1]
    return means.repeat_interleave(rate, 0)[offset : offset + number], sums[-1]


@by_stages(0, 1, 2)
def compress(
    kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor, rate: int, pages: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Pass a step's tokens, kv and gate `[T, S, C]` float32 at `positions` `[T]`, through the sums in `pages`
    `[P, S, 3, C]`. Returns `[T, C]`, which holds the mean of a window for its last token.
    """
    return step.advance(pages, partial(compress_one, rate), partial(compress_many, rate), kv, gate, positions)
