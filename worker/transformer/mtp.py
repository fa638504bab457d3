"""The head of a checkpoint that predicts the token after the next one: it reads the hidden state of a token, after the
last norm, and the embedding of the token that follows, and shares embedding and output head with the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat
from quire.worker.layers.norm import NORMS
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.blocks import BLOCKS
from quire.worker.transformer.calls import LayerCall


class PredictionHead(nn.Module):
    """Names of its tensors are those of Qwen3.5; a family's others are in `MTPSpec.names`."""

    def __init__(self, spec: ModelSpec, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        size, self.hidden_first = spec.hidden_size, spec.mtp.hidden_first
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            NORMS[spec.norm](size, spec.norm_eps) for _ in range(3)
        )
        self.fc = ColumnParallelLinear(2 * size, [Shard("mtp.fc", size, 0, size)], False, weights.linear("mtp.fc"))
        longer = replace(spec, layers=(*spec.layers, spec.mtp.layer))
        layer = BLOCKS[spec.form](longer, len(spec.layers), "mtp.layers.0", weights)
        self.layers = nn.ModuleDict({"0": layer})

    @property
    def rope(self) -> str | None:
        """The name of the layer's rotary embedding."""
        return self.layers["0"].rope

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Map the embeddings `[T, H]` of the next tokens and hidden states `[T, H]` to hidden states `[T, H]`, of which
        the output head makes logits of the tokens after the next ones.
        """
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        joined = torch.cat(both[::-1] if self.hidden_first else both, -1)
        x, residual = self.layers["0"](self.fc(joined), None, call)
        return self.norm.add(x, residual)[0]
