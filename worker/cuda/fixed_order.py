"""`--deterministic` on GPUs: every sum of a row has one order, whatever the rest of the batch.

Products, attention and experts get tiles of one size, without splits, tokens pass recurrent states one by one, images
are encoded alone, and ranks add their parts in rank order. All other kernels compute rows independently.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.layers.linear import Linear, LinearMethod, RowProduct
from quire.worker.layers.moe import ListedExperts, StackedExperts
from quire.worker.layers.quantization.int_groups import Reordered
from quire.worker.parallel import tp
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.mixers.base import Convolution, StateMixer
from quire.worker.transformer.mla import MLAttention
from quire.worker.transformer.vision.tower import VisionTower

BACKEND = "triton_fixed"
_OWN_PRODUCTS = ("Gemma3n", "HYV4")  # architectures with products outside linear layers


def resolve(config: Config, spec: ModelSpec, ops: Ops) -> tuple[bool, str]:
    """See `Platform.batch_invariance`."""
    off = "seeded and greedy tokens may depend on other requests"
    if config.device.deterministic is False:
        return False, f"as asked: {off}"
    obstacle = _obstacle(config, spec, ops)
    if config.device.deterministic:
        if obstacle:
            raise ValueError(f"--deterministic {''.join(obstacle)}")
        return True, "as asked: a request's tokens do not depend on other requests"
    return False, f"{off}: --deterministic " + (obstacle[0] if obstacle else "makes sure that they do not")


def _obstacle(config: Config, spec: ModelSpec, ops: Ops) -> tuple[str, str] | None:
    """Return (why sums cannot have one order, as a predicate of `--deterministic`; the remedy), or None."""
    backend = config.device.attention_backend
    if ops.name != "triton":
        return "needs Triton on this device, which the log says why it does not work", ""
    if backend not in (None, BACKEND):
        return "has an attention backend of its own", f": leave --attention-backend {backend} off"
    if spec.implementation != "quire" or spec.architecture.startswith(_OWN_PRODUCTS):
        return "does not support the products of this model on a GPU", ""
    if spec.is_encoder or spec.crosses:
        return "supports models that generate text only", ""
    if spec.vision is not None and spec.vision.bidirectional:
        return "supports no images that attend in both directions on a GPU", ": set --language-model-only"
    if any(layer.compressed for layer in spec.layers):
        return "supports no attention to compressed keys on a GPU", ""
    if index := next((layer.index for layer in spec.layers if layer.index), None):
        return "supports no attention to chosen keys", f": set --max-model-len to at most {index.top}"
    return None


class FixedLinear(LinearMethod):
    """Weights as `PlainLinear` has them, multiplied in one order."""

    fixed_order = True

    def __init__(self) -> None:
        from quire.worker.cuda.kernels.triton_fixed import multiply

        self._multiply = multiply

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, layer.weight, layer.bias)


def fix_order(model: nn.Module) -> None:
    """See `Platform.fix_order`. Raises ValueError for weights without a product of that kind."""
    from quire.worker.cuda.kernels import triton_fixed

    plain = FixedLinear()
    for layer in model.modules():
        if isinstance(layer, RowProduct):
            layer.multiply = triton_fixed.multiply
        elif isinstance(layer, MLAttention):
            layer.attn.to_latents = layer.attn.to_values = triton_fixed.multiply_heads
        elif isinstance(layer, StackedExperts):
            layer.run, layer.multiply = partial(layer.run, fixed_order=True), triton_fixed.multiply
        elif isinstance(layer, ListedExperts):
            layer.fixed_order = True
        elif isinstance(layer, StateMixer):
            layer.ops = _state_ops(layer.ops)
        elif isinstance(layer, Convolution):
            layer.causal_conv = partial(layer.causal_conv, fixed_order=True)
        elif isinstance(layer, VisionTower):
            layer.one_by_one = True
        elif isinstance(layer, Linear) and not _fixes(layer.method):
            if layer.weight is None:
                raise ValueError(
                    f"--deterministic has no product for weights of this form ({type(layer.method).__name__}) on a GPU"
                )
            layer.method = plain
    tp().fix_order()


def _fixes(method: LinearMethod) -> bool:
    """Let a method multiply each row in one order, whatever the number of rows. Returns whether it can."""
    from quire.worker.cuda.quantized import TritonBlocks, TritonGroups

    inner = method.method if isinstance(method, Reordered) else method
    if isinstance(inner, (TritonGroups, TritonBlocks)):
        inner.fix_order()
        return True
    return inner.fixed_order


def _state_ops(ops: Ops) -> Ops:
    """Return the operations of mixers whose tokens pass their state one by one."""
    from quire.worker.cuda.kernels import triton_fixed, triton_states

    fixed = copy.copy(ops)
    fixed.gated_delta_rule = partial(triton_states.gated_delta_rule, fixed_order=True)
    fixed.linear_attention = partial(triton_states.linear_attention, fixed_order=True)
    fixed.float_linear = lambda x, weight, bias: triton_fixed.multiply(x, weight.T, bias)
    return fixed
