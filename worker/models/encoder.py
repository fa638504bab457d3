"""The encoder shared by the models whose tokens attend in both directions: whole prompts in one step, no cache."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.attention.base import GroupedMetadata
from quire.worker.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import NORMS
from quire.worker.layers.rotary import Rotation
from quire.worker.models.attention import out_projection, qkv_projection
from quire.worker.models.blocks import DecoderLayer, Streams, rows
from quire.worker.models.config import ModelSpec
from quire.worker.models.decoder import CausalLM
from quire.worker.models.mlp import PlainMLP
from quire.worker.parallel import Exchange


class EncoderAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`. Every token attends to all tokens of its request,
    which are all in this step.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        self.qkv_proj = qkv_projection(spec, kind, prefix, weights)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.head_dim = kind.head_dim

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None, attn: GroupedMetadata, needed_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, -1, self.head_dim)).permute(1, 2, 0, 3)  # [3, heads, T, D]
        starts, _ = attn[0].host_lengths()
        lengths = [stop - start for start, stop in pairwise(starts)]
        attended = torch.cat(
            [F.scaled_dot_product_attention(*request.unsqueeze(1)) for request in qkv.split(lengths, 2)], 2
        )
        attended = attended[0].transpose(0, 1).flatten(1)
        return self.o_proj(rows(attended, needed_rows))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """The all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]


class EncoderLayer(DecoderLayer):
    """Norms of the sums: after attention is added to its input, and after the MLP is."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")
    mixers = {"bidirectional": EncoderAttention}
    mlps = {"plain": PlainMLP}

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation | None,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
    ) -> Streams:
        attended = self.self_attn(x, rotation, attn, needed_rows)
        x = self.post_attention_layernorm(rows(x, needed_rows) + attended)
        return self.post_feedforward_layernorm(x + self.mlp(x)), None


class Encoder(nn.Module):
    """The layers after the norm of the sum of three embeddings: of tokens, positions and types."""

    first = last = True  # of the pipeline's stages

    def __init__(self, spec: ModelSpec, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        size, offset = spec.hidden_size, spec.learned_positions
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, size, "model.embed_tokens", weights)
        self.embed_positions = PositionEmbedding(spec.max_position_embeddings + offset, size, offset)
        self.embed_types = PositionEmbedding(spec.num_token_types, size, 0)
        self.embed_norm = NORMS[spec.norm](size, spec.norm_eps)
        self.layers = nn.ModuleDict(
            {str(i): EncoderLayer(spec, i, f"model.layers.{i}", weights) for i in range(spec.num_hidden_layers)}
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if token_types is None or len(self.embed_types.weight) == 1:
            token_types = torch.zeros_like(positions)
        x = self.embed_tokens(input_ids) + self.embed_positions(positions) + self.embed_types(token_types)
        x = self.embed_norm(x)
        *layers, last = self.layers.values()
        for layer in layers:
            x, _ = layer(x, None, None, attn)
        return last(x, None, None, attn, needed_rows)[0]


class ClassifierHead(nn.Module):
    """Maps pooled hidden states `[P, H]` to logits `[P, num_labels]`."""

    def __init__(self, size: int, num_labels: int):
        super().__init__()
        self.dense, self.out_proj = nn.Linear(size, size), nn.Linear(size, num_labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(torch.tanh(self.dense(pooled)))


class EncoderLM(CausalLM):
    """An encoder for embeddings, or with a classifier of its first token."""

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Encoder:
        return Encoder(spec, weights)

    def make_classifier(self, spec: ModelSpec) -> nn.Module:
        return ClassifierHead(spec.hidden_size, len(spec.labels))

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.score(pooled.to(self.dtype)).float()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_types` `[T]`: 1 for the tokens of a pair's second text, by default 0 for all."""
        return self.model(input_ids, positions, attn, needed_rows, token_types)
