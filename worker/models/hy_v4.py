"""Hunyuan 4: latent attention with sinks and a gate per entry, independent hyper-connections, DeepSeek V3's experts
with bounded inputs of the activation.

An index chooses `index_topk` keys per token (`mixers/key_index.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat, empty_parameter
from quire.worker.layers.moe import give_other_parts
from quire.worker.layers.rowwise import sigmoid
from quire.worker.models.deepseek import GlmMoeDsa
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.hyper_connections import HyperDecoder, StreamProduct, num_streams


class StreamWeights(nn.Module):
    """`sets` weights per stream of streams `[T, S, H]`, all from their norm: `[T, S]` float32 each. transformers writes
    their tensors at the prefix `other`.
    """

    def __init__(self, spec: ModelSpec, prefix: str, other: str, sets: int):
        super().__init__()
        self.streams = num_streams(spec)
        rows = sets * self.streams
        self.fn = StreamProduct(spec, prefix, rows)
        give_other_parts(self.fn.weight, [[Part(f"{other}_fn", tuple(self.fn.weight.shape))]])
        for name, shape in {"base": (rows,), "scale": (sets,)}.items():
            weight = empty_parameter(*shape, parts=[Part(f"{prefix}_{name}", shape)], dtype=torch.float32)
            give_other_parts(weight, [[Part(f"{other}_{name}", shape)]])
            self.register_parameter(name, weight)

    def forward(self, streams: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(self.fn(streams).split(self.streams, -1), self.scale, self.base.split(self.streams))
        return [sigmoid(part * scale + base) for part, scale, base in parts]


class HYV4Layer(DecoderLayer):
    """A layer on all streams x `[T, S, H]`; the residual is always None. Each half reads a weighted sum of the streams,
    and its weighted result is added to each.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.eps, self.magnitude = spec.raw.get("hc_eps", 1e-6), spec.raw.get("hc_magnitude", 2.0)
        self.attn_hc, self.mlp_hc = (
            StreamWeights(spec, f"{prefix}.{half}.hc_pre.hc", f"{prefix}.hc_pre.{half}.hc", 2)
            for half in ("hc_attn_layer", "hc_mlp_layer")
        )

    def forward(self, x: torch.Tensor, residual: None, call: LayerCall) -> tuple[torch.Tensor, None]:
        read, writes = self.read(x, self.attn_hc)
        attended = self.self_attn(self.input_layernorm(read), call)
        x = write(call.needed(x), attended, call.needed(writes))
        read, writes = self.read(x, self.mlp_hc)
        return write(x, self.mlp(self.post_attention_layernorm(read)), writes), None

    def read(self, streams: torch.Tensor, weights: StreamWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a half of the layer reads `[T, H]`, and the weights of its result per stream `[T, S]`."""
        reads, writes = weights(streams)
        return weighted(streams, reads + self.eps), self.magnitude * writes + self.eps


def weighted(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum over streams `[T, S, H]` with weights `[T, S]`."""
    return (weights[..., None] * streams).sum(1).to(streams.dtype)


def write(streams: torch.Tensor, x: torch.Tensor, writes: torch.Tensor) -> torch.Tensor:
    """Return the streams after a half of a layer, whose result is x `[T, H]`."""
    return (writes[..., None] * x[:, None].float() + streams.float()).to(streams.dtype)


class HYV4Decoder(HyperDecoder):
    """The last norm reads a weighted sum of the streams."""

    of_last_stage: ClassVar = (*HyperDecoder.of_last_stage, "model.hc_head", "model.hc_pre.hc_head")

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.eps = spec.raw.get("hc_eps", 1e-6)
        if self.last:
            self.hc_head = StreamWeights(spec, "model.hc_head.hc_head", "model.hc_pre.hc_head.hc_head", 1)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return HYV4Layer

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        return weighted(streams, self.hc_head(streams)[0] + self.eps)


class HYV4(GlmMoeDsa):
    config_defaults = GlmMoeDsa.config_defaults | {
        "model_type": "hy_v4",
        "vocab_size": 120832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "num_experts": 256,
        "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "rope_interleave": False,
        "swiglu_limit": 10.0,
        "index_n_heads": 16,
        "indexer_rope_interleave": False,
        "index_rope_first": False,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 2,
    }
    facts = {"entry_gate": True, "sinks": True}
    renames = GlmMoeDsa.renames | {
        "self_attn.g_proj": "self_attn.linear_gate",
        "self_attn.sinks": "self_attn.learnable_sink_param",
    }
    ignored = (*GlmMoeDsa.ignored, r"^model\.mtp_layers\.")
    # a head is a plain layer, without streams
    mtp_names: ClassVar[dict[str, str]] = {
        "layer": "model.mtp_layers.{i}",
        "fc": "model.mtp_layers.{i}.eh_proj",
        "pre_fc_norm_embedding": "model.mtp_layers.{i}.enorm",
        "pre_fc_norm_hidden": "model.mtp_layers.{i}.hnorm",
        "norm": "model.mtp_layers.{i}.final_layernorm",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["index_eps"] = values["rms_norm_eps"]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        limit = values["swiglu_limit"] or 0.0
        activation = f"silu_of_bounded:{float(limit):g}" if limit > 0 else "silu"
        return replace(super().moe(values), activation=activation, shared_activation="silu")

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return HYV4Decoder(spec, max_model_len, weights)
