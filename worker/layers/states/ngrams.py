"""The rows of n-grams in tables of embeddings (`spec/ngrams.py`). The state is the tokens before the next one.

Tokens are kept as their distance from the token that separates texts, so that the zeros of a new state are that token.
"""

from __future__ import annotations

import torch

from quire.worker.layers.state import StateStep, by_stages
from quire.worker.spec.ngrams import NgramSpec


def ngram_rows(ids: torch.Tensor, spec: NgramSpec, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Return the rows, int64 `[T, heads]`, of the n-grams that end at the tokens ids `[T]`, of all heads' tables one
    after another. `pages` are `[P, n - 1]`.
    """
    last = (ids - spec.eos).float()[:, None].expand(-1, spec.size)
    return hashed(_windows(last, pages, step).long(), spec)


def hashed(windows: torch.Tensor, spec: NgramSpec) -> torch.Tensor:
    """Return the rows of windows `[T, n]`, whose tokens less the separator are in the order of the text."""
    mixed, rows = (windows[:, -1] + spec.eos) * spec.multipliers[0], []
    known = torch.ones_like(windows[:, -1])
    each, start = len(spec.rows) // (spec.size - 1), 0
    for back, factor in enumerate(spec.multipliers[1:], 1):
        token = windows[:, -1 - back]
        known = known * (token != 0)  # else the token, and those before it, are of another text
        mixed = mixed ^ ((token * known + spec.eos) * factor)
        for size in spec.rows[(back - 1) * each : back * each]:
            rows.append(mixed % size + start)
            start += size
    return torch.stack(rows, 1)


@by_stages(0)
def _windows(last: torch.Tensor, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Return the last n tokens at each, float32 `[T, n]`; `last` `[T, n]` is each token, repeated."""
    return step.advance(pages, _one, _many, last)


def _one(states: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.cat([states, last[:, :1]], 1)
    return window, window[:, 1:]


def _many(state: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.cat([state, last[:, 0]])
    return text.unfold(0, last.shape[1], 1), text[len(last) :]
