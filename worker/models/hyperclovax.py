"""HyperCLOVA X: Granite's multipliers, and norms also after attention and the MLP."""

from __future__ import annotations

from typing import Any

from quire.worker.models.granite import Granite


class HyperCLOVAX(Granite):
    config_defaults = Granite.config_defaults | {
        "model_type": "hyperclovax",
        "attention_multiplier": None,
        "use_post_norm": True,
    }

    facts = {"form": "sandwich"}
    renames = {
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["logit_scale"] = values["logits_scaling"]
        if not values["use_post_norm"]:
            raise ValueError("use_post_norm false is not supported for HyperCLOVA X")
