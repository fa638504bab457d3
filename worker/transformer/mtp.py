"""A head of a checkpoint that predicts a token after the next one: it reads the hidden state of a token, after the
last norm, and the embedding of a token that follows, and shares embedding and output head with the model. The first
head reads the model's hidden states and the next token, each other one those of the head before and one token further.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat, whole
from quire.worker.layers.norm import NORMS
from quire.worker.spec.model import ModelSpec, num_caches
from quire.worker.transformer.blocks import BLOCKS
from quire.worker.transformer.calls import LayerCall


class PredictionHead(nn.Module):
    """Head `index` of a model. Names of its tensors in files are in `MTPSpec.names`."""

    def __init__(self, spec: ModelSpec, index: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        size, self.hidden_first = spec.hidden_size, spec.mtp.hidden_first
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            NORMS[spec.norm](size, spec.norm_eps) for _ in range(3)
        )
        name = f"mtp.{index}"
        self.fc = whole(2 * size, size, f"{name}.fc", weights)
        self.layer = BLOCKS[spec.form](*head_layer(spec, index), f"{name}.layer", weights)

    @property
    def rope(self) -> str | None:
        """Return the name of the layer's rotary embedding."""
        return self.layer.rope

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Map the embeddings `[T, H]` of tokens that follow and hidden states `[T, H]` to hidden states `[T, H]`, which
        the output head maps to logits of the tokens after these.
        """
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        joined = torch.cat(both[::-1] if self.hidden_first else both, -1)
        x, residual = self.layer(self.fc(joined), None, call)
        return self.norm.add(x, residual)[0]

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the output head `[S, H]` for hidden states of this head."""
        return hidden


def head_layer(spec: ModelSpec, index: int) -> tuple[ModelSpec, int]:
    """Return the layer of head `index`, as (spec of a model that has it after all its caches, index of the layer)."""
    first = num_caches(spec)
    more = [spec.mtp.layer] * (first - len(spec.layers) + spec.mtp.count)
    return replace(spec, layers=(*spec.layers, *more)), first + index
