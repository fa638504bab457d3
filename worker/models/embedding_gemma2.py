"""EmbeddingGemma 2 (text): Gemma 4's layers with attention in both directions. Per-layer inputs are made of the
embeddings alone, and a projection follows the last norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.models.gemma import Gemma
from quire.worker.models.gemma4 import Gemma4Layer, WideFullLayers
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import StageCall
from quire.worker.transformer.encoder import Encoder, EncoderLM
from quire.worker.transformer.per_layer import PerLayerInputs, replicated
from quire.worker.transformer.reader import FULL, pattern


class EmbeddingGemma2Encoder(Encoder):
    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.inputs = PerLayerInputs(spec, weights)
        sizes = spec.hidden_size, spec.embedding_size
        self.embedding_projection = replicated(*sizes, "model.embedding_projection", weights)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Gemma4Layer

    def forward(self, call: StageCall) -> torch.Tensor:
        x = self.embed(call)
        for layer, layer_call in self.layer_calls(call, self.inputs(call.input_ids, x)):
            x, _ = layer(x, None, layer_call)
        return self.embedding_projection(self.norm(x))


class EmbeddingGemma2(WideFullLayers, EncoderLM):
    config_defaults = Gemma.config_defaults | {
        "model_type": "embedding_gemma2_text",
        "vocab_size": 262144,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 262144,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 512,
        "embedding_dim": 768,
    }
    facts = {
        "norm": "rms_wide",
        "form": "sandwich",
        "mixer": "bidirectional",
        "qk_norm": "head",
        "v_norm": True,
        "scale": 1.0,
        "tie_word_embeddings": False,
    }
    renames = {
        "model.inputs": "model.ple",
        "model.per_layer_model_projection": "model.ple.per_layer_model_projection",
        "per_layer_input_gate": "ple_block.per_layer_input_gate",
        "per_layer_projection": "ple_block.per_layer_projection",
        "gate.post_per_layer_input_norm": "ple_block.post_per_layer_input_norm",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        Gemma.complete.__func__(cls, values, raw)
        for key in ("hidden_size_per_layer_input", "embedding_dim", "sliding_window"):
            if not isinstance(values[key], int) or values[key] < 1:
                raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
        values["embedding_size"] = values["embedding_dim"]
        values["sliding_window"] += 1  # config.json does not count the token itself
        for layer in (raw.get("per_layer_config") or {}).values():  # sizes of the layers with full attention
            values["global_head_dim"] = layer.get("head_dim", values["global_head_dim"])
            values["num_global_key_value_heads"] = layer.get("num_key_value_heads", values["num_key_value_heads"])

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], values["sliding_window_pattern"], last_full=True)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        if kind != FULL:
            return layer
        size = values["global_head_dim"]
        return replace(layer, head_dim=size, v_head_dim=size, num_kv_heads=values["num_global_key_value_heads"])

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Encoder:
        return EmbeddingGemma2Encoder(spec, max_model_len, weights)
