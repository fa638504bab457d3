"""Whether no request changes a bit of another's: as `--deterministic` says; where it says nothing, if that is cheap.

Two things of a step may depend on how many rows it has: its products (`fixed_order_linear.py`) and its attention
(`fixed_order_attention.py`). Both have a way that does not. It is the default where it takes less than 5 % longer on
the loads of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import torch

from quire.configs.config import Config
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.native import KERNELS
from quire.worker.models.config import ModelSpec

PROMISE = "a request's tokens do not depend on what runs beside it"


def resolve(config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
    """(whether a request's bits are independent of the others, why and at what cost).

    Raises ValueError where `--deterministic` is given and this model or device has no such way.
    """
    asked = config.device.deterministic
    if asked is False:
        return False, "as asked: " + _off()
    obstacle = _obstacle(config, spec, dtype)
    if obstacle and asked:
        raise ValueError(f"--deterministic {''.join(obstacle)}")
    if obstacle:
        return False, f"{_off()}: --deterministic {obstacle[0]}"
    cheap, cost = _cost(config.model.quantization)
    if asked:
        return True, f"as asked: {PROMISE}; {cost}"
    if cheap:
        return True, f"{PROMISE}; {cost}"
    return False, f"{_off()}. --deterministic makes sure that they do not, but {cost}"


def _off() -> str:
    return "seeded and greedy tokens may depend on what runs beside them"


def _cost(quantization: str | None) -> tuple[bool, str]:
    """(whether that is little enough for a default, what the loaded kernels pay); measured in docs/deployment.md."""
    if cpu_ops.has_amx():
        if quantization:
            return False, "prompts take 2 to 2.7 times as long"
        return True, "no cost that could be told from noise"
    if KERNELS.level == "avx2":
        if quantization:
            return False, "prompts take 1.4 times as long"
        return False, "prompts take 1.65 times as long, decoding of many requests 1.25 times"
    return False, "products of many rows take twice as long, those of up to 5 rows no longer"


def _obstacle(config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[str, str] | None:
    """What is not known to be independent of the batch, in words that go on from `--deterministic`, and what helps."""
    backend = config.device.attention_backend
    if config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size > 1:
        return "works with one rank", ": leave --tensor-parallel-size and --pipeline-parallel-size at 1"
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 only, and this would be {name}", ": set --dtype bfloat16"
    if backend not in (None, "cpu_fixed"):
        return "has an attention backend of its own", f": leave --attention-backend {backend} off"
    if KERNELS.lib is None:
        return f"needs the native CPU kernels: {KERNELS.status}", ""
    if reason := cpu_ops.attention_reason(spec.head_dim, dtype):
        return f"needs the native attention: {reason}", ""
    return None
