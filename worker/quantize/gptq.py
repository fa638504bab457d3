"""GPTQ (https://arxiv.org/abs/2210.17323): round a weight column by column, and let the remaining columns compensate
for each error, given the inputs of the layer.
"""

from __future__ import annotations

import torch

from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.quantize.formats import Format, Quantized

DAMPING = 0.01  # share of the mean of the Hessian's diagonal
_BLOCK = 128  # columns whose corrections of the columns after them are applied at once


class Observer(LinearMethod):
    """Multiplies as `method` does and adds up x^T x of the inputs: the Hessian, `[k, k]` float32."""

    def __init__(self, method: LinearMethod):
        self.method, self.hessian, self.num_rows = method, None, 0

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.hessian is None:
            self.hessian = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self.hessian.addmm_(wide.T, wide)
        self.num_rows += len(x)
        return self.method.apply(layer, x)


def gptq(weight: torch.Tensor, hessian: torch.Tensor, form: Format, act_order: bool) -> Quantized:
    """Return weight `[n, k]` rounded so that the outputs for the inputs with `hessian` change least.

    With `act_order` columns are rounded in the order of the size of their inputs; their groups stay those of
    neighbouring columns, so that the result is stored and multiplied like any other.
    """
    weight, hessian = weight.float().clone(), hessian.clone()
    size = form.group_length(weight.shape[1])
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    weight[:, unused] = 0
    importance = hessian.diagonal().clone()
    order = importance.argsort(descending=True) if act_order else torch.arange(len(hessian))
    groups = (order // size).tolist()
    weight = weight[:, order]
    inverse = _inverse(hessian[order][:, order])
    # scales of groups whose columns come one after another are chosen again when the first one's turn has come
    scales = form.scales(weight[:, order.argsort()], importance)
    again = not act_order and form.group is not None
    block = size * max(1, _BLOCK // size) if again else _BLOCK  # so that no group is in two blocks
    values, scales = torch.empty_like(weight.T), scales.T.contiguous()
    for start in range(0, weight.shape[1], block):
        end = min(start + block, weight.shape[1])
        columns = weight[:, start:end].T.contiguous()  # one after another in memory
        errors = torch.empty_like(columns)
        for i in range(start, end):
            column, rest = columns[i - start], columns[i - start + 1 :]
            if again and i % size == 0:
                group = columns[i - start : i - start + size].T.contiguous()
                scales[groups[i]] = form.scales(group, importance[i : i + size])[:, 0]
            scale = scales[groups[i]].float()
            values[i] = form.round(column, scale)
            torch.div(column - values[i] * scale, inverse[i, i], out=errors[i - start])
            rest.addr_(inverse[i, i + 1 : end], errors[i - start], alpha=-1)
        weight[:, end:].addmm_(errors.T, inverse[start:end, end:], alpha=-1)
    return form.stored(values.T[:, order.argsort()].contiguous(), scales.T.contiguous())


def _inverse(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian. Damping grows until it is invertible."""
    damping = DAMPING * float(hessian.diagonal().mean())
    for _ in range(8):
        damped = hessian + damping * torch.eye(len(hessian))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed:
            return upper
        damping *= 10
    raise ValueError("GPTQ: the inputs of a layer are not finite, or too large; use --method rtn")
