"""Per-layer inputs (Gemma 3n and 4, EmbeddingGemma 2): a small vector per token and layer, made of the token and its
embedding, or of the embedding alone, that gates an addition to the residual stream at the end of the layer.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS
from quire.worker.layers.embedding import WholeEmbedding
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat
from quire.worker.layers.norm import NORMS
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import Decoder


def replicated(in_features: int, out_features: int, prefix: str, weights: WeightFormat) -> ColumnParallelLinear:
    """Return a linear layer that every rank holds whole."""
    return ColumnParallelLinear(
        in_features, [Shard(prefix, out_features, 0, out_features)], False, weights.linear(prefix)
    )


class PerLayerInputs(nn.ModuleDict):
    """Maps ids `[T]` and their embeddings `[T, H]` to `[T, L, size]`. Its modules have the names of the decoder's."""

    def __init__(self, spec: ModelSpec, weights: WeightFormat = PLAIN_WEIGHTS):
        self.size, self.num_layers = spec.hidden_size_per_layer_input, spec.num_hidden_layers
        width = self.size * self.num_layers
        projection = replicated(spec.hidden_size, width, "model.per_layer_model_projection", weights)
        norm = NORMS[spec.norm](self.size, spec.norm_eps)
        super().__init__({"per_layer_model_projection": projection, "per_layer_projection_norm": norm})
        if spec.vocab_size_per_layer_input:
            name = "model.inputs.embed_tokens_per_layer"
            self["embed_tokens_per_layer"] = WholeEmbedding(spec.vocab_size_per_layer_input, width, name, weights)
        self.scale = float(torch.tensor(self.size**0.5, device="cpu"))  # rounded to the weights' dtype
        self.projection_scale = spec.hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        shape = self.num_layers, self.size
        projected = (self["per_layer_model_projection"](embedded) * self.projection_scale).unflatten(-1, shape)
        normed = self["per_layer_projection_norm"](projected.flatten(0, 1)).view_as(projected)
        if "embed_tokens_per_layer" not in self:
            return normed
        table = self["embed_tokens_per_layer"]
        # multimodal tokens are beyond the table
        own = table(torch.where(input_ids < table.num_rows, input_ids, 0)) * self.scale
        return (normed + own.unflatten(-1, shape)) * 2.0**-0.5


class PerLayerDecoder(Decoder):
    """A decoder whose first stage computes the per-layer inputs, because the others have no token ids. Each stage sends
    the inputs of later stages along with its hidden states.
    """

    of_first_stage: ClassVar = (
        *Decoder.of_first_stage,
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm",
    )

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.inputs = PerLayerInputs(spec, weights) if self.first and spec.hidden_size_per_layer_input else None

    @property
    def stream_width(self) -> int:
        """Return the number of entries per token in the residual stream."""
        return self.spec.hidden_size

    @property
    def received_width(self) -> int:
        behind = self.spec.num_hidden_layers - int(next(iter(self.layers)))
        return self.stream_width + behind * self.spec.hidden_size_per_layer_input

    def unpack(self, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split the previous stage's result into the residual stream and the inputs of the layers from here on `[T, L,
        size]`, None in a model without.
        """
        size = self.spec.hidden_size_per_layer_input
        stream, inputs = received[:, : self.stream_width], received[:, self.stream_width :]
        return stream, inputs.unflatten(1, (-1, size)) if size else None

    def pack(self, stream: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
        """Undo `unpack`: join the residual stream and the inputs, for the next stage."""
        return stream if inputs is None else torch.cat([stream, inputs[:, len(self.layers) :].flatten(1)], 1)


class PerLayerGate(nn.ModuleDict):
    """The addition of one layer: maps x `[T, H]` and the layer's inputs `[T, size]` to `[T, H]`."""

    def __init__(self, spec: ModelSpec, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        size, hidden = spec.hidden_size_per_layer_input, spec.hidden_size
        super().__init__(
            {
                "per_layer_input_gate": replicated(hidden, size, f"{prefix}.per_layer_input_gate", weights),
                "per_layer_projection": replicated(size, hidden, f"{prefix}.per_layer_projection", weights),
                "post_per_layer_input_norm": NORMS[spec.norm](hidden, spec.norm_eps),
            }
        )
        self.activation = ACTIVATIONS[spec.hidden_act]

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        gated = self.activation(self["per_layer_input_gate"](x)) * inputs
        return self["post_per_layer_input_norm"](self["per_layer_projection"](gated))
