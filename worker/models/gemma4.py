"""Gemma 4 (text): layers with full attention have larger heads, the last layers read the keys and values of earlier
ones, and per-layer inputs are added at the end of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.worker.attention.base import GroupedMetadata
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.rotary import Rotation
from quire.worker.models.blocks import DecoderLayer, SandwichLayer
from quire.worker.models.config import LayerSpec, ModelSpec
from quire.worker.models.decoder import CausalLM, Decoder
from quire.worker.models.gemma import Gemma
from quire.worker.models.per_layer import PerLayerGate, PerLayerInputs, refuse_stages
from quire.worker.models.reader import FULL, SLIDING, pattern, shared_layer
from quire.worker.models.rope import RopeSpec, read_rope
from quire.worker.models.vision.embeds import ImageEmbeds


class Gemma4Layer(SandwichLayer):
    """Ends with the per-layer input and a factor of its own. The residual stream is x alone: the residual is None."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.gate = PerLayerGate(spec, prefix, weights) if spec.hidden_size_per_layer_input else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        x, residual = super().forward(x, None, rotation, attn, needed_rows)
        x = x + residual
        if self.gate is not None:
            x = x + self.gate(x, inputs if needed_rows is None else inputs[needed_rows])
        return x * self.layer_scalar, None


class Gemma4Decoder(Decoder):
    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        refuse_stages(spec)
        super().__init__(spec, max_model_len, weights)
        self.inputs = PerLayerInputs(spec, weights) if spec.hidden_size_per_layer_input else None

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Gemma4Layer

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
        images: ImageEmbeds | None = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids, positions, images) if self.first else hidden
        if images is not None:
            input_ids = input_ids.index_fill(0, images.rows, self.spec.raw.get("pad_token_id") or 0)
        inputs = self.inputs(input_ids, x) if self.inputs is not None else None
        rotations, last = self.rotary_emb(positions), list(self.layers)[-1]
        for name, layer in self.layers.items():
            needed, mine = needed_rows if name == last else None, None if inputs is None else inputs[:, int(name)]
            x, _ = layer(x, None, rotations[layer.rope], attn, needed, mine)
        return self.norm(x) if self.last else x


class Gemma4(CausalLM):
    config_defaults = Gemma.config_defaults | {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "rope_theta": 1000000.0,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "per_layer_config": None,
    }
    facts = {"norm": "rms_wide", "form": "sandwich", "qk_norm": "head", "v_norm": True, "scale": 1.0}
    renames = {"model.inputs": "model", "gate.post_per_layer_input_norm": "post_per_layer_input_norm"}
    ignored = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)  # of layers that read the cache of others

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["enable_moe_block"]:
            raise ValueError("enable_moe_block is not supported: it needs experts beside the MLP")
        Gemma.complete.__func__(cls, values, raw)
        values["logit_soft_cap"] = values["final_logit_softcapping"]
        sizes = raw.get("per_layer_config") or {}  # how transformers writes the sizes of layers with full attention
        for layer in sizes.values():
            values["global_head_dim"] = layer.get("head_dim", values["global_head_dim"])
            values["num_global_key_value_heads"] = layer.get("num_key_value_heads")

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], 6, last_full=True)

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_parameters") or {}
        proportional = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        wide, local = values | {"head_dim": values["global_head_dim"]}, values | {"rope_theta": 10000.0}
        return {
            FULL: read_rope(dict(given.get(FULL) or proportional), wide, raw),
            SLIDING: read_rope(dict(given.get(SLIDING) or {}), local, raw),
        }

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        if values["layer_types"]:
            values["layer_types"] = [*values["layer_types"][:-1], FULL]
        return super().layer_specs(values, raw, ropes)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        if kind == FULL:
            size = values["global_head_dim"]
            layer = replace(layer, head_dim=size, v_head_dim=size, key_is_value=values["attention_k_eq_v"])
            if values["attention_k_eq_v"] and values["num_global_key_value_heads"]:
                layer = replace(layer, num_kv_heads=values["num_global_key_value_heads"])
        source = shared_layer(values["layer_types"] or cls.layer_types(values), values["num_kv_shared_layers"], index)
        if source is None:
            return layer
        factor = 2 if values["use_double_wide_mlp"] else 1
        return replace(layer, kv_from=source, intermediate_size=factor * layer.intermediate_size)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Gemma4Decoder(spec, max_model_len, weights)
