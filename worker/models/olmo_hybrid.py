"""OLMo-hybrid: Gated DeltaNet with negative eigenvalues, and OLMo's attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.olmo import Olmo2
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.spec.state import DeltaSpec
from quire.worker.transformer.reader import FULL, STATE

_NORM_EPS = 1e-5  # of the mixers' norms, whatever config.json says about the others


class OlmoHybrid(Olmo2):
    config_defaults = Olmo2.config_defaults | {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    }
    facts = Olmo2.facts | {"form": "state_pre"}
    state_kinds = {STATE: STATE}
    renames = {"input_layernorm": "attention_layer_norm"}

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        """Return None if config.json says so, as that of the published models does."""
        if "rope_parameters" in raw and (raw["rope_parameters"] or {}).get("rope_theta") is None:
            return {}
        return super().ropes(values, raw)

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        kinds = [FULL if i % 4 == 3 else STATE for i in range(values["num_hidden_layers"])]
        return kinds if FULL in kinds else [*kinds[:-1], FULL]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return layer
        heads = values["num_attention_heads"]
        keys, number = values["linear_num_key_heads"] or heads, values["linear_num_value_heads"] or heads
        dim = values["linear_key_head_dim"] or int(0.75 * values["hidden_size"] / keys)
        state = DeltaSpec(
            keys,
            number,
            dim,
            values["linear_value_head_dim"] or 2 * dim,
            values["linear_conv_kernel_dim"],
            neg_eigval=values["linear_allow_neg_eigval"],
            norm_eps=_NORM_EPS,
        )
        return replace(layer, mixer="separate_delta", state=state)
