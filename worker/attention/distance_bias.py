"""A bias of attention scores that depends on the distance of a key behind its query and on the query (Inkling), and
sinks that depend on the query (Inkling 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """Each head of a token mixes R learned profiles over the distances 0 .. D - 1; farther keys have no bias."""

    states: torch.Tensor  # [T, num_heads, R]
    profiles: torch.Tensor  # [R, D]
    sinks: torch.Tensor | None = None  # [T, num_heads]: scores of one more key, whose value is 0

    def of(self, tokens: torch.Tensor | slice) -> DistanceBias:
        """Return the bias of some of the tokens."""
        sinks = None if self.sinks is None else self.sinks[tokens]
        return DistanceBias(self.states[tokens], self.profiles, sinks)

    def at(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the bias float32 `[T, num_heads, keys]` of keys at `distances` int64 `[T, keys]`."""
        by_distance, most = (self.states @ self.profiles).float(), self.profiles.shape[1]
        index = distances.clamp(0, most - 1)[:, None].expand(-1, by_distance.shape[1], -1)
        outside = (distances < 0) | (distances >= most)
        return by_distance.gather(-1, index).masked_fill_(outside[:, None], 0.0)
