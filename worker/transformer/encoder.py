"""The encoder shared by the models whose tokens attend in both directions: whole prompts in one step, no cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quire.worker.layers.embedding import PositionEmbedding
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import NORMS
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.calls import StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder

Activation = Callable[[torch.Tensor], torch.Tensor]


class Encoder(Decoder):
    """Layers of bidirectional attention. The embeddings of token types are added to those of tokens."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if spec.num_token_types:
            self.embed_types = PositionEmbedding(spec.num_token_types, spec.hidden_size, 0)
        if spec.embed_norm:
            self.embed_norm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps)

    def forward(self, call: StageCall) -> torch.Tensor:
        x, residual = self.embed(call), None
        if self.spec.num_token_types:
            typed = call.token_types is not None and self.spec.num_token_types > 1
            x = x + self.embed_types(call.token_types if typed else torch.zeros_like(call.positions))
        if self.spec.embed_norm:
            x = self.embed_norm(x)
        for layer, layer_call in self.layer_calls(call):
            x, residual = layer(x, residual, layer_call)
        return x if residual is None else self.norm.add(x, residual)[0]


class ClassifierHead(nn.Module):
    """Maps pooled hidden states `[P, H]` to logits `[P, num_labels]`, by default as BERT does."""

    def __init__(self, spec: ModelSpec, activation: Activation = torch.tanh, *, bias: bool = True, norm: bool = False):
        super().__init__()
        self.dense, self.activation = nn.Linear(spec.hidden_size, spec.hidden_size, bias=bias), activation
        self.norm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps) if norm else nn.Identity()
        self.out_proj = nn.Linear(spec.hidden_size, len(spec.labels))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.norm(self.activation(self.dense(pooled))))


class EncoderLM(CausalLM):
    """An encoder for embeddings, or with a classifier of its pooled tokens."""

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Encoder:
        return Encoder(spec, max_model_len, weights)

    def make_classifier(self, spec: ModelSpec) -> nn.Module:
        return ClassifierHead(spec)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.score(pooled.to(self.dtype)).float()
