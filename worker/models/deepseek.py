"""DeepSeek with plain attention, V2 and V3 (also Kimi K2) and GLM-4.7-Flash with latent attention; mixtures of experts.

V3.2 and GLM-5 add an index that chooses `index_topk` keys per token (`mixers/key_index.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.index import INDEX_DEFAULTS, with_index
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mla import MLA_DEFAULTS, MLAFamily
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing, sigmoid_routing
from quire.worker.transformer.mtp_spec import WithMTP
from quire.worker.transformer.reader import COMMON_DEFAULTS, text_part

# keys of config.json, with defaults of DeepSeek V2
V2_DEFAULTS = (
    COMMON_DEFAULTS
    | MOE_DEFAULTS
    | {
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "mlp_layer_types": None,
        "moe_layer_freq": 1,
    }
)


_UNLIMITED_LAYER, _UNLIMITED_WINDOW = "reference_sliding_attention", 128


class V2Experts(MoEFamily):
    """Reads the keys of the experts of DeepSeek V2; a mixin of `CausalLM`."""

    renames: ClassVar[dict[str, str]] = {"mlp.shared_expert": "mlp.shared_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["num_experts_per_tok"] = values["num_experts_per_tok"] or 6

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        listed, frequency = values["mlp_layer_types"], values["moe_layer_freq"]
        return super().is_sparse(values, index) and (bool(listed) or index % frequency == 0)

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        """Return the rule that chooses the experts."""
        if values["norm_topk_prob"]:
            raise ValueError("norm_topk_prob true is not supported for DeepSeek V2")
        groups = {"num_groups": values["n_group"], "top_groups": values["topk_group"]}
        if values["topk_method"] not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method {values['topk_method']!r} is not supported for DeepSeek V2")
        groups = groups if values["topk_method"] == "group_limited_greedy" else {}
        return routing(values, scale=values["routed_scaling_factor"], float32=True, **groups)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        return MoESpec(cls.routing(values), size, shared_size=size * (values["n_shared_experts"] or 0))


class Deepseek(V2Experts, CausalLM):
    """DeepSeek MoE and the language models of the DeepSeek-OCR family: V2's experts with plain attention."""

    config_defaults = V2_DEFAULTS | {
        "model_type": "deepseek",
        "vocab_size": 129280,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 896,
        "first_k_dense_replace": 1,
        "use_mla": False,
    }

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        if not any(name.startswith("UnlimitedO") for name in raw.get("architectures") or []):
            return super().read_config(architecture, raw)
        text = text_part(raw)
        window = text.get("sliding_window") or raw.get("sliding_window") or _UNLIMITED_WINDOW
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"sliding_window must be a positive integer, not {window!r}")
        if unknown := set(text.get("layer_types") or []) - {_UNLIMITED_LAYER}:
            raise ValueError(f"layer_types must be {_UNLIMITED_LAYER} for Unlimited-OCR, found {sorted(unknown)}")
        spec = super().read_config(architecture, text | {"layer_types": None, "sliding_window": None})
        return replace(spec, layers=tuple(replace(layer, output_window=window) for layer in spec.layers))

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if values["use_mla"]:
            raise ValueError("use_mla true is not supported for DeepSeek with plain attention")
        values["head_dim"] = None  # DeepSeek-OCR's config.json has sizes of heads of latent attention, which are 0


class DeepseekV2(V2Experts, MLAFamily, CausalLM):
    config_defaults = V2_DEFAULTS | MLA_DEFAULTS | {"model_type": "deepseek_v2"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["rope_interleaved"] = True


class DeepseekV3(WithMTP, DeepseekV2):
    config_defaults = DeepseekV2.config_defaults | {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
    }
    facts = {"mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["rope_interleaved"] = values["rope_interleave"]

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        return sigmoid_routing(values)


class Glm4MoeLite(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    }


class Indexed(DeepseekV3):
    """DeepSeek V3.2."""

    config_defaults = (
        DeepseekV3.config_defaults
        | INDEX_DEFAULTS
        | {
            "model_type": "deepseek_v32",
            "max_position_embeddings": 163840,
        }
    )

    @classmethod
    def indexed(cls, values: dict[str, Any], layers: Sequence[LayerSpec]) -> list[bool]:
        """Return for each layer whether an index chooses its keys."""
        return [layer.latent is not None for layer in layers]

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layers = super().layer_specs(values, raw, ropes)
        return with_index(layers, values, cls.indexed(values, layers))


class GlmMoeDsa(Indexed):
    """GLM-5."""

    config_defaults = Indexed.config_defaults | {
        "model_type": "glm_moe_dsa",
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    }
