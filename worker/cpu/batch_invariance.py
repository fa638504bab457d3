"""Decide whether a request's bits are independent of the other requests: by `--deterministic` or, without it, by cost.

In a step, the results of products (`fixed_order_linear.py`) and of attention (`fixed_order_attention.py`) may depend on
the number of rows. Both have an implementation whose results do not. It is the default if it takes less than 5 %
longer on the loads of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import torch

from quire.configs.config import Config
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu import states
from quire.worker.cpu.native import KERNELS
from quire.worker.spec.model import LayerSpec, ModelSpec

PROMISE = "a request's tokens do not depend on other requests"


def resolve(config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
    """Return (whether a request's bits are independent of the other requests, the reason and the cost).

    Raises:
        ValueError: `--deterministic` is given, and this model or device does not support it.
    """
    asked = config.device.deterministic
    if asked is False:
        return False, "as asked: " + _off()
    if asked and KERNELS.left_to_serve:
        return True, f"as asked, if the native kernels support this model: {PROMISE}"
    obstacle = _obstacle(config, spec, dtype)
    if obstacle and asked:
        raise ValueError(f"--deterministic {''.join(obstacle)}")
    if obstacle:
        return False, f"{_off()}: --deterministic {obstacle[0]}"
    cheap, cost = _cost(bool(config.model.quantization or spec.raw.get("quantization_config")))
    if any(layer.index for layer in spec.layers):
        cheap, cost = False, "tokens that choose keys are computed one by one"
    if asked:
        return True, f"as asked: {PROMISE}; {cost}"
    if cheap:
        return True, f"{PROMISE}; {cost}"
    return False, f"{_off()}. --deterministic makes sure that they do not, but {cost}"


def _off() -> str:
    return "seeded and greedy tokens may depend on other requests"


def _cost(quantized: bool) -> tuple[bool, str]:
    """Return (whether the cost is low enough for a default, the cost with the loaded kernels), from docs/deployment.md.
    """
    if cpu_ops.has_amx():
        if quantized:
            return False, "prompts take 2 to 2.7 times as long"
        return True, "no measurable cost"
    if KERNELS.level == "avx2":
        if quantized:
            return False, "prompts take 1.4 times as long"
        return False, "prompts take 1.65 times as long, decoding of many requests 1.25 times"
    return False, "products of many rows take twice as long, those of up to 5 rows no longer"


def _obstacle(config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return (why batch invariance is unavailable, as a predicate of `--deterministic`; the remedy), or None if
    available.
    """
    backend = config.device.attention_backend
    if config.parallel.world_size > 1:
        return "works with one rank", ": leave --tensor-parallel-size and --pipeline-parallel-size at 1"
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 only, and this would be {name}", ": set --dtype bfloat16"
    if backend not in (None, "cpu_fixed"):
        return "has an attention backend of its own", f": leave --attention-backend {backend} off"
    if KERNELS.lib is None:
        return f"needs the native CPU kernels: {KERNELS.status}", ""
    if spec.implementation != "quire":
        return "works with models that quire computes itself", ": set --model-impl quire"
    if any(layer.state and (reason := states.reason(layer.state.shapes(1))) for layer in spec.layers):
        return f"needs the native kernels for recurrent states: {reason}", ""
    if any(layer.compressed for layer in spec.layers):
        return "has no attention to compressed keys", ""
    if index := next((layer.index for layer in spec.layers if layer.index and layer.index.block), None):
        return "has no attention to chosen blocks", f": set --max-model-len to at most {index.top}"
    if any(layer.mixer == "convolved" for layer in spec.layers):
        return "has no convolution of whole heads", ""
    if any(layer.bias_extent for layer in spec.layers):
        return "has no bias of scores by distance", ""
    for head_dim, v_dim in {_attended_sizes(layer) for layer in spec.layers if layer.attends}:
        if reason := cpu_ops.attention_reason(head_dim, v_dim, dtype):
            return f"needs the native attention: {reason}", ""
    return None


def _attended_sizes(layer: LayerSpec) -> tuple[int, int]:
    """Return the entries of keys and values; all tokens attend to the latents of MLA."""
    return (layer.latent.width, layer.latent.rank) if layer.latent else (layer.head_dim, layer.v_head_dim)
