"""Muon for the matrices of the layers, Adam for the rest.

Muon (Keller Jordan, 2024): the momentum of a matrix is replaced by its nearest orthogonal matrix, found by a few
Newton-Schulz iterations, so that every direction of the matrix learns at the same speed. Matrices of one shape are
handled together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(matrices: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> about U V^T of each matrix's singular value decomposition, computed in `dtype`, by the
    quintic iteration x <- a x + (b A + c A A) x with A = x x^T.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """One of `ranks` optimizers, which share the parameters of `model` among them: each owns every `ranks`-th matrix of
    a
    shape, and rank 0 owns all other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_lr: float,
        other_lr: float,
        weight_decay: float,
        rank: int = 0,
        ranks: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
    ):
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, p in model.named_parameters():
            if name.endswith("_proj.weight"):
                groups[tuple(p.shape)].append(p)
            else:
                others.append(p)
        self.matrices = [own for ps in groups.values() if (own := ps[rank::ranks])]
        self.momenta = [torch.zeros(len(ps), *ps[0].shape) for ps in self.matrices]
        self.adam = torch.optim.Adam(others if rank == 0 else [torch.zeros(0)], lr=other_lr, betas=betas, eps=1e-10)
        self.matrix_lr, self.other_lr, self.weight_decay, self.momentum, self.dtype = (
            matrix_lr,
            other_lr,
            weight_decay,
            momentum,
            dtype,
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [p for ps in self.matrices for p in ps] + self.adam.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates times `scale`; clears the gradients."""
        for ps, momentum in zip(self.matrices, self.momenta):
            grads = torch.stack([p.grad for p in ps])
            momentum.lerp_(grads, 1 - self.momentum)
            update = orthogonalize(grads.lerp_(momentum, self.momentum), self.dtype).float()
            lr = self.matrix_lr * scale
            size = max(1.0, ps[0].shape[0] / ps[0].shape[1]) ** 0.5
            for p, u in zip(ps, update):
                p.mul_(1 - lr * self.weight_decay).add_(u, alpha=-lr * size)
                p.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.other_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])
