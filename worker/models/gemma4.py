"""Gemma 4 (text): layers with full attention have larger heads, the last layers read the keys and values of earlier
ones, and per-layer inputs are added at the end of each layer. In the models with experts, these stand next to the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat, empty_parameter
from quire.worker.layers.norm import rms_norm
from quire.worker.models.gemma import Gemma
from quire.worker.parallel import Exchange
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.transformer.blocks import DecoderLayer, SandwichLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.moe import MoE, Router
from quire.worker.transformer.moe_reader import MoEFamily, routing
from quire.worker.transformer.per_layer import PerLayerDecoder, PerLayerGate
from quire.worker.transformer.reader import ALIASES, FULL, SLIDING, pattern, shared_layer


class Gemma4Layer(SandwichLayer):
    """Ends with the per-layer input and a factor of its own. The residual stream is x alone: the residual is None."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.gate = PerLayerGate(spec, prefix, weights) if spec.hidden_size_per_layer_input else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> tuple[torch.Tensor, None]:
        x, residual = super().forward(x, None, call)
        x = x + residual
        if self.gate is not None:
            x = x + self.gate(x, call.needed(call.inputs))
        return x * self.layer_scalar, None


class Gemma4Router(Router):
    """Reads the residual stream, normalised and scaled per entry; the weights have a factor per expert."""

    place = "router.proj"

    def __init__(self, hidden_size: int, spec: RoutingSpec, prefix: str):
        super().__init__(hidden_size, spec, prefix)
        above = prefix.removesuffix(".proj")
        self.scale = _vector(f"{above}.scale", hidden_size)
        self.per_expert_scale = _vector(f"{above}.per_expert_scale", spec.num_experts)
        self.eps = 0.0  # of the norm, set by the experts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = rms_norm(x, None, self.eps) * self.scale * x.shape[-1] ** -0.5
        weights, ids = super().forward(scaled)
        return weights * self.per_expert_scale[ids], ids


class Gemma4Experts(MoE):
    """Maps the norm x of the residual stream, and the stream, `[T, H]` each, to `[T, H]`."""

    router: ClassVar = Gemma4Router

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.gate.eps = spec.norm_eps

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.experts(x, *self.gate(stream)))


class Gemma4ExpertsLayer(Gemma4Layer):
    """The outputs of the MLP and of the experts are normalised, each, and added."""

    norm_names: ClassVar = (
        *Gemma4Layer.norm_names,
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.moe = Gemma4Experts(spec, layer, prefix, weights)

    def feed_forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        dense = self.post_feedforward_layernorm_1(self.mlp(x))
        routed = self.moe(self.pre_feedforward_layernorm_2(stream), stream)
        return dense + self.post_feedforward_layernorm_2(routed)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [*super().exchanges(num_tokens, num_needed), *self.moe.exchanges(num_needed)]


class Gemma4Decoder(PerLayerDecoder):
    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Gemma4ExpertsLayer if spec.layers[0].moe else Gemma4Layer

    def forward(self, call: StageCall) -> torch.Tensor:
        if self.first:
            x, input_ids = self.embed(call), call.input_ids
            if call.images is not None:
                input_ids = input_ids.index_fill(0, call.images.rows, self.spec.raw.get("pad_token_id") or 0)
            inputs = self.inputs(input_ids, x) if self.inputs is not None else None
        else:
            x, inputs = self.unpack(call.hidden)
        for layer, layer_call in self.layer_calls(call, inputs):
            x, _ = layer(x, None, layer_call)
        return self.norm(x) if self.last else self.pack(x, inputs)


class WideFullLayers:
    """A mixin for families whose layers with full attention have heads and a rotary embedding of their own. The last
    layer is one of them.
    """

    full_rope: ClassVar[dict[str, Any]] = {}  # of these layers, if config.json has none

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_parameters") or {}
        wide, local = values | {"head_dim": values["global_head_dim"]}, values | {"rope_theta": 10000.0}
        return {
            FULL: read_rope(dict(given.get(FULL) or cls.full_rope), wide, raw),
            SLIDING: read_rope(dict(given.get(SLIDING) or {}), local, raw),
        }

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        if values["layer_types"]:
            values["layer_types"] = [*values["layer_types"][:-1], FULL]
        return super().layer_specs(values, raw, ropes)


class Gemma4(WideFullLayers, CausalLM):
    full_rope: ClassVar = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
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
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "per_layer_config": None,
    }
    aliases = ALIASES | MoEFamily.aliases
    facts = {"norm": "rms_wide", "form": "sandwich", "qk_norm": "head", "v_norm": True, "scale": 1.0}
    renames = {"model.inputs": "model", "gate.post_per_layer_input_norm": "post_per_layer_input_norm"}
    ignored = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)  # of layers that read the cache of others

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
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
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        if kind == FULL:
            size = values["global_head_dim"]
            layer = replace(layer, head_dim=size, v_head_dim=size, key_is_value=values["attention_k_eq_v"])
            if values["attention_k_eq_v"] and values["num_global_key_value_heads"]:
                layer = replace(layer, num_kv_heads=values["num_global_key_value_heads"])
        if values["enable_moe_block"]:
            layer = replace(layer, moe=cls.moe(values))
        source = shared_layer(values["layer_types"] or cls.layer_types(values), values["num_kv_shared_layers"], index)
        if source is None:
            return layer
        factor = 2 if values["use_double_wide_mlp"] else 1
        return replace(layer, kv_from=source, intermediate_size=factor * layer.intermediate_size)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        """Return the spec of the experts."""
        size = values["moe_intermediate_size"]
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"moe_intermediate_size must be a positive integer, not {size!r}")
        return MoESpec(routing(values, weights="normalized"), size, activation=values["hidden_act"])

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Gemma4Decoder(spec, max_model_len, weights)


class Gemma4Unified(Gemma4):
    """The language model of those that read images and sound without an encoder: without per-layer inputs."""

    config_defaults = Gemma4.config_defaults | {
        "model_type": "gemma4_unified_text",
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    }


def _vector(name: str, size: int) -> nn.Parameter:
    """Return a parameter `[size]`, the checkpoint's tensor `name`, which is about 1."""
    return empty_parameter(size, parts=[Part(name, (size,))])
