"""Reading of Mamba mixers from config.json. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from quire.worker.spec.state import Mamba1Spec, Mamba2Spec

# keys of the hybrids with Mamba 2, with their defaults
MAMBA2_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}


def mamba2(values: dict[str, Any], **changes: Any) -> Mamba2Spec:
    """Return the mixer of a hybrid. Raises ValueError, naming the keys, for sizes that do not fit each other."""
    heads, dim = values["mamba_n_heads"], values["mamba_d_head"]
    inner = int(values["mamba_expand"] * values["hidden_size"])
    if dim == "auto":
        dim = inner // heads
    if heads * dim != inner and "mamba_d_ssm" not in values:
        raise ValueError(f"mamba_n_heads {heads} * mamba_d_head {dim} is not mamba_expand * hidden_size = {inner}")
    low, high = time_step_limit(values)
    fields = {
        "num_heads": heads,
        "head_dim": dim,
        "state_size": values["mamba_d_state"],
        "num_groups": values["mamba_n_groups"],
        "width": values["mamba_d_conv"],
        "conv_bias": values["mamba_conv_bias"],
        "bias": values["mamba_proj_bias"],
        "dt_min": low,
        "dt_max": high,
        "norm_groups": values["mamba_n_groups"],
        "eps": values["rms_norm_eps"],
    }
    return Mamba2Spec(**fields | changes)


def pure_mamba2(values: dict[str, Any], num_heads: int, head_dim: int, state_size: int) -> Mamba2Spec:
    """Return the mixer of a layer that has nothing else. Nemotron-H and Mamba 2 name the sizes differently."""
    return Mamba2Spec(
        num_heads,
        head_dim,
        state_size,
        values["n_groups"],
        values["conv_kernel"],
        values["use_conv_bias"],
        values["use_bias"],
        *time_step_limit(values),
        norm_groups=values["n_groups"],
        eps=values["rms_norm_eps"],
    )


def time_step_limit(values: dict[str, Any]) -> tuple[float, float]:
    """Return the bounds of the time step, `time_step_limit` of config.json; transformers writes an infinite one as an
    object. `time_step_min` and `time_step_max` are no bounds, but the range that the biases were drawn from before the
    training: the published code, vLLM and llama.cpp do not read them, transformers' Nemotron-H and Zamba 2 use the
    lower one as a bound in prompts, though not in decoding (huggingface/transformers#48989).
    """
    low, high = (
        float(bound["__float__"] if isinstance(bound, dict) else bound)
        for bound in values["time_step_limit"] or (0.0, math.inf)
    )
    return low, high


def mamba1(values: dict[str, Any], inner: int, **changes: Any) -> Mamba1Spec:
    """Return the mixer of Mamba 1 with the keys of Mamba, `dt_rank` "auto" being a sixteenth of the hidden size."""
    rank = values["time_step_rank"]
    fields = {
        "inner": inner,
        "state_size": values["state_size"],
        "dt_rank": math.ceil(values["hidden_size"] / 16) if rank == "auto" else rank,
        "width": values["conv_kernel"],
        "conv_bias": values["use_conv_bias"],
        "bias": values["use_bias"],
    }
    return Mamba1Spec(**fields | changes)
