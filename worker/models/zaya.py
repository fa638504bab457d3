"""ZAYA: compressed convolutional attention, one expert per token or none, chosen by an MLP that also reads what the
router of the layer before read, and a float32 residual stream with learned scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import (
    PLAIN,
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    RowProduct,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.norm import RMSNorm, norm_weight
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.spec.state import HeadConvSpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.moe import MoE
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
_THETA = {FULL: 5e6, SLIDING: 1e4}


class RouterProjection(ColumnParallelLinear):
    """A projection with bias, the same on every rank, that no format quantizes."""

    takes_adapters: ClassVar = False

    def __init__(self, in_features: int, out_features: int, prefix: str):
        super().__init__(in_features, [Shard(prefix, out_features, 0, out_features)], True, PLAIN)


class ZayaRouter(nn.Module):
    """Chooses an expert of each row of x `[T, H]`, see `Router`; the last choice stands for none, whose weight is 0."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str):
        super().__init__()
        self.num_experts, size = spec.layers[layer].moe.routing.num_experts, spec.raw.get("router_hidden_size", 256)
        self.down_proj = RouterProjection(spec.hidden_size, size, f"{prefix}.down_proj")
        self.router_states_scale = norm_weight(size) if layer else None
        self.norm = RMSNorm(size, spec.norm_eps)
        self.norm.weight.parts = [Part(f"{prefix}.router_mlp.norm.weight", (size,))]
        self.fc1, self.fc2 = (RouterProjection(size, size, f"{prefix}.router_mlp.{name}") for name in ("fc1", "fc2"))
        self.out_proj = RowProduct(size, self.num_experts + 1, f"{prefix}.router_mlp.out_proj")
        part = Part(f"{prefix}.balancing_biases", (self.num_experts + 1,))
        self.biases = empty_parameter(self.num_experts + 1, parts=[part], dtype=torch.float32)

    def forward(
        self, x: torch.Tensor, before: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return ((weights float32 `[T, 1]`, ids int64 `[T, 1]`), what the next layer's router reads as `before`)."""
        read = self.down_proj(x)
        if self.router_states_scale is not None:
            read = read + before * self.router_states_scale
        hidden = F.gelu(self.fc2(F.gelu(self.fc1(self.norm(read)))))
        scores = self.out_proj.multiply(hidden, self.out_proj.weight).float().softmax(-1)
        ids = (scores + self.biases).argmax(-1, keepdim=True)
        weights, none = scores.gather(-1, ids), ids == self.num_experts
        return (weights.masked_fill(none, 0.0), ids.masked_fill(none, 0)), read


class ZayaMoE(MoE):
    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.gate = ZayaRouter(spec, layer, f"{prefix}.gate")

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, read = self.gate(x, before)
        return self.run(x, chosen), read


class ResidualScale(nn.Module):
    """The residual stream after a half of a layer: its result and the stream, each with a bias and a scale."""

    def __init__(self, size: int):
        super().__init__()
        for name in ("hidden_states", "residual"):
            self.register_parameter(f"{name}_scale", norm_weight(size))
            self.register_parameter(f"{name}_bias", norm_weight(size))
            getattr(self, f"{name}_bias").dummy_mean = 0.0

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        x = (x + self.hidden_states_bias) * self.hidden_states_scale
        return x + (stream + self.residual_bias) * self.residual_scale


class ZayaLayer(DecoderLayer):
    """A layer whose x is the residual stream `[T, H]` in float32; residual is the input of the last layer's router."""

    mlps: ClassVar = DecoderLayer.mlps | {"moe": ZayaMoE}

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.post_attention_residual_scale, self.post_mlp_residual_scale = (
            ResidualScale(spec.hidden_size) for _ in range(2)
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.input_layernorm.weight.dtype
        attended = self.self_attn(self.input_layernorm(x.to(dtype)), call)
        x = self.post_attention_residual_scale(attended, call.needed(x))
        before = None if residual is None else call.needed(residual)
        out, read = self.mlp(self.post_attention_layernorm(x.to(dtype)), before)
        return self.post_mlp_residual_scale(out, x), read


class ZayaDecoder(Decoder):
    """A stage passes on the stream, rounded to the model's dtype, and what its last router read."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.input_hidden_states_scale = norm_weight(spec.hidden_size)
        self.input_hidden_states_bias = norm_weight(spec.hidden_size)
        self.input_hidden_states_bias.dummy_mean = 0.0

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return ZayaLayer

    @property
    def received_width(self) -> int:
        return self.spec.hidden_size + self.spec.raw.get("router_hidden_size", 256)

    def forward(self, call: StageCall) -> torch.Tensor:
        if self.first:
            x = self.embed(call)
            x, read = ((x + self.input_hidden_states_bias) * self.input_hidden_states_scale).float(), None
        else:
            x, read = call.hidden.tensor_split([self.spec.hidden_size], 1)
            x = x.float()
        for layer, layer_call in self.layer_calls(call):
            x, read = layer(x, read, layer_call)
        dtype = self.input_hidden_states_scale.dtype
        return self.norm(x.to(dtype)) if self.last else torch.cat([x.to(dtype), read], 1)


class Zaya(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "zaya",
            "vocab_size": 262272,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 2048,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "lm_head_bias": False,
            "cca_time0": 2,
            "cca_time1": 2,
            "partial_rotary_factor": 0.5,
        }
    )
    state_kinds = _KINDS

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, wanted in (("attention_bias", False), ("lm_head_bias", False), ("num_experts_per_tok", 1)):
            if values[key] != wanted:
                raise ValueError(f"{key} must be {wanted} for ZAYA, not {values[key]!r}")
        for key in ("cca_time0", "cca_time1"):
            if not isinstance(values[key], int) or not 2 <= values[key] <= 16:
                raise ValueError(f"{key} must be a number from 2 to 16, not {values[key]!r}")
        values["intermediate_size"] = values["moe_intermediate_size"]  # no layer has an MLP for all tokens

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_parameters") or {}
        return {
            kind: read_rope(dict(given.get(name) or {}), values | {"rope_theta": _THETA[kind]}, raw)
            for name, kind in _KINDS.items()
        }

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(routing(values), values["moe_intermediate_size"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        widths = values["cca_time0"], values["cca_time1"]
        state = HeadConvSpec(layer.num_heads, layer.num_kv_heads, layer.head_dim, widths)
        return replace(layer, mixer="convolved", state=state)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return ZayaDecoder(spec, max_model_len, weights)
