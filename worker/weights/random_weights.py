"""Random weights instead of a checkpoint's."""

from __future__ import annotations

import zlib

import torch

from quire.worker.weights.checkpoint import Placement


class DummyWeights:
    """Random weights, generated fast: entry i of a checkpoint tensor is entry `offset(name) + i` of one fixed block of
    noise, repeated indefinitely.

    The block's length is prime, so that the rows of a matrix start at different positions in it.
    """

    BLOCK = 1_000_003
    STD = 0.02

    def __init__(self, seed: int):
        self.seed = seed
        self._noise = torch.randn(self.BLOCK, generator=torch.Generator().manual_seed(seed))
        self._blocks: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def fill(self, placement: Placement, may_lend: bool) -> bool:
        """Fill a slice: matrices and biases are Gaussian around 0, other vectors around 1, unless their parameter has a
        `dummy_mean`, the mean of the checkpoint's tensor. Returns False, because no memory is lent.
        """
        part, target = placement.part, placement.target
        mean = 1.0 if len(part.shape) == 1 else 0.0
        mean = 0.0 if part.name.endswith("bias") else getattr(placement.parameter, "dummy_mean", mean)
        block = self._block(mean, target.dtype, target.device)
        offset = zlib.crc32(part.name.encode(), self.seed)
        first_dims = [dim for dim, _, _ in part.source]
        if part.view is None and first_dims in ([], [0]) and target.is_contiguous():
            start = part.source[0][1] if part.source else 0
            _repeat(block, offset + start * (part.shape[1] if len(part.shape) > 1 else 1), target.view(-1))
        else:
            whole = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            _repeat(block, offset, whole.view(-1))
            target.copy_(part.take(whole))
        return False

    def _block(self, mean: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = mean, dtype, device
        if key not in self._blocks:
            self._blocks[key] = (self._noise * self.STD + mean).to(device, dtype)
        return self._blocks[key]


def _repeat(block: torch.Tensor, offset: int, out: torch.Tensor) -> None:
    """Compute `out[i] = block[(offset + i) % len(block)]` in long copies."""
    done = 0
    while done < len(out):
        start = (offset + done) % len(block)
        length = min(len(block) - start, len(out) - done)
        out[done : done + length] = block[start : start + length]
        done += length
