"""The vision transformers of SigLIP and CLIP, for images of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, PatchEmbedding, named, table

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
SIGLIP = _DEFAULTS | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
CLIP = _DEFAULTS | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}


class VisionTransformer(nn.Module):
    """Maps images `[B, 3, image_size, image_size]` to the features of their patches, `[B, N, C]`, row by row.

    `vision` is a `vision_config` with its defaults (SIGLIP, CLIP). CLIP's has a token for the image before the patches
    and a norm before the layers. `num_layers` of the layers are computed, by default all; `final_norm` is that after
    the last one.
    """

    def __init__(
        self,
        vision: dict[str, Any],
        weights: WeightFormat,
        prefix: str = "vision_tower",
        num_layers: int | None = None,
        *,
        clip: bool = False,
        final_norm: bool = False,
    ):
        super().__init__()
        size, eps = vision["hidden_size"], vision["layer_norm_eps"]
        self.hidden_size, self.side = size, vision["image_size"] // vision["patch_size"]
        spec = EncoderSpec.read(vision)
        if num_layers is not None:
            spec = replace(spec, num_layers=num_layers)
        name = f"{prefix}.embeddings"
        self.patch_embedding = PatchEmbedding(size, vision["patch_size"], f"{name}.patch_embedding", bias=not clip)
        self.positions = table(f"{name}.position_embedding.weight", self.side**2 + clip, size)
        self.class_embedding = table(f"{name}.class_embedding", size) if clip else None
        self.pre_norm = named(LayerNorm(size, eps), f"{prefix}.pre_layrnorm") if clip else None
        self.encoder = Encoder(spec, f"{prefix}.encoder.layers", weights)
        self.final_norm = named(LayerNorm(size, eps), f"{prefix}.post_layernorm") if final_norm else None

    def forward(self, pixels: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """Encode the image. With `whole` its token, if there is one, comes first."""
        x, batch, length = self._first(pixels)
        x = self.encoder(x, [length] * batch)
        x = x if self.final_norm is None else self.final_norm(x)
        return self._seen(x.view(batch, length, -1), whole)

    def with_layers(self, pixels: torch.Tensor, layers: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the features of `forward`, and the outputs of `layers`, ascending; -1 is the first layer's input."""
        x, batch, length = self._first(pixels)
        kept = [x] if -1 in layers else []
        for i, layer in enumerate(self.encoder.layers):
            x = layer(x, [length] * batch)
            kept += [x] if i in layers else []
        x = x if self.final_norm is None else self.final_norm(x)
        return self._seen(x.view(batch, length, -1)), [self._seen(one.view(batch, length, -1)) for one in kept]

    def _seen(self, x: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """Leave out the image's token, if there is one."""
        return x if whole or self.class_embedding is None else x[:, 1:]

    def _first(self, pixels: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Return the input of the first layer `[B * N, C]`, and B and N."""
        x = self.patch_embedding(pixels.to(self.positions.dtype)).flatten(1, 2)
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), 1)
        x = self.embed_positions(x)
        batch, length, _ = x.shape
        x = x.flatten(0, 1) if self.pre_norm is None else self.pre_norm(x.flatten(0, 1))
        return x, batch, length

    def embed_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Add the embeddings of the positions to x `[B, N, C]`."""
        return x + self.positions
