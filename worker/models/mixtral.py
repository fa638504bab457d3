"""Mixtral: Mistral with experts instead of the MLP."""

from __future__ import annotations

from typing import Any

from quire.worker.models.mistral import Mistral
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing


class Mixtral(MoEFamily, Mistral):
    config_defaults = (
        Mistral.config_defaults
        | MOE_DEFAULTS
        | {"model_type": "mixtral", "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1000000.0}
    )
    renames = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(routing(values, weights="normalized"), values["intermediate_size"])
