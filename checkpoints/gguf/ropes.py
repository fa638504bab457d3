"""The scaling of rotary embeddings, from the metadata and tensors of GGUF files. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.checkpoints.gguf.metadata import FULL, Metadata
from quire.checkpoints.gguf.names import LONG_FACTORS, ROPE_FACTORS

_TENTHS = ("deepseek2", "deepseek32", "hy_v4", "mistral4")
Factors = Mapping[str, list[float]]  # the values of the tensors ROPE_FACTORS and LONG_FACTORS that the file has


def rope_scaling(m: Metadata, config: dict[str, Any], factors: Factors) -> dict[str, Any] | None:
    """Return the scaling by the file's tensors, or else by its metadata; None: there is none."""
    if (values := factors.get(ROPE_FACTORS)) and any(factor != 1.0 for factor in values):
        return _llama3_scaling(config, values)
    if all(name in factors for name in LONG_FACTORS.values()):
        listed = {key: factors[name] for key, name in LONG_FACTORS.items()}
        return {"rope_type": "longrope", **listed, "attention_factor": m.get("rope.scaling.attn_factor") or 1.0}
    return named_scaling(m)


def named_scaling(m: Metadata) -> dict[str, Any] | None:
    """Return the scaling that the metadata names, or None."""
    name = m.get("rope.scaling.type")
    factor = m.find("rope.scaling.factor") or m.find("rope.scale_linear") or 1.0
    if name == "none" or (name == "linear" and factor == 1.0):
        return None
    if name not in ("linear", "yarn"):
        raise ValueError(f"{m.kind}.rope.scaling.type {name!r} is not supported; supported: none, linear, yarn")
    return {"rope_type": name, "factor": factor} | (_yarn(m, factor) if name == "yarn" else {})


def _yarn(m: Metadata, factor: float) -> dict[str, Any]:
    scaling = {"original_max_position_embeddings": m.get("rope.scaling.original_context_length")}
    scale, own = m.get("rope.scaling.attn_factor") or 1.0, m.find("rope.scaling.yarn_attn_factor") or 1.0
    # files hold config.json's attention_factor, which replaces what the type computes, or attn_factor, which is 1
    if scale != 1.0 or own != 1.0:
        scaling["attention_factor"] = scale * (own if own != 1.0 else 0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        scaling[key] = m.get(f"rope.scaling.yarn_{key}")
    if m.kind == "gpt-oss":
        scaling["truncate"] = False
    # some store a tenth of it
    if scale := (m.find("rope.scaling.yarn_log_multiplier") or 0) * (10 if m.kind in _TENTHS else 1):
        scaling |= {"mscale": round(scale, 6), "mscale_all_dim": round(scale, 6)}
    if beta := m.get("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = beta
    return scaling


def _llama3_scaling(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """Return the settings of Llama 3 from which the divisors of the frequencies were computed."""
    dim, theta = 2 * len(factors), config["rope_theta"]
    if isinstance(theta, list):  # one per layer; only layers without a window are scaled
        theta = theta[config["layer_types"].index(FULL)]
    largest = max(factors)
    for original in (8192, 256, 4096, 16384, 32768):
        scaling = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        found = [_llama3_factor(theta ** (-2 * i / dim), original, **scaling) for i in range(len(factors))]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, factors)):
            return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}
    raise ValueError(f"the tensor {ROPE_FACTORS} has factors that are not those of Llama 3, which is not supported")


def _llama3_factor(
    frequency: float, original: int, factor: float, low_freq_factor: float, high_freq_factor: float
) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high_freq_factor:
        return 1.0
    if wavelength > original / low_freq_factor:
        return factor
    smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return 1 / ((1 - smooth) / factor + smooth)
