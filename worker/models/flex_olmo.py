"""FlexOlmo: OLMo 2 with experts in every layer."""

from __future__ import annotations

from typing import Any

from quire.worker.models.olmo import Olmo2
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, softmax_routing


class FlexOlmo(MoEFamily, Olmo2):
    config_defaults = (
        Olmo2.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "flex_olmo",
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "num_experts": 7,
            "num_experts_per_tok": 5,
        }
    )

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(softmax_routing(values), values["intermediate_size"])
