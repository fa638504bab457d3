"""The interface of a vision encoder: features of images in, rows for the language model out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Linear, WeightFormat
from quire.worker.spec.vision import VisionSpec, read_image_token_id

_PIXEL_BYTES = 3 * 16 * 16 * 4  # per patch


class VisionTower(nn.Module):
    """The encoder and the projector of a model that reads images, whole on every rank and in the first stage. A family
    is a subclass and a line in `wrappers.WRAPPERS`.

    Parameters list their `Part`s with names of one generation of files, e.g. "visual.merger.mlp.0.weight" or
    "vision_tower.ln_pre.weight". The loader also finds them with "model." in front, or without it. A parameter without
    parts is not allowed. Every parameter must be in the files; tensors below `prefixes` that no parameter uses are
    skipped. Weights are in the model's dtype also if the language model is quantized; `--quantization` leaves them
    unchanged, except for `int8` and audio.
    """

    # beginnings of the names of the checkpoint's tensors that belong to the tower, in the same generation
    prefixes: ClassVar[tuple[str, ...]]
    patches_per_embed: int = 1  # patches of an image that make one embedding
    one_by_one = False  # whether images are encoded alone, so that none changes the bits of another

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        """Return facts about the images of the model with this config.json. Families override it for a placeholder that
        the file names in another way, bidirectional images, deepstack and mrope. Raises ValueError, naming the key, for
        settings that are not supported.
        """
        return VisionSpec(architecture, config, read_image_token_id(config))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        """Read the sizes; `config` is the whole config.json."""
        super().__init__()

    def bytes_per_embed(self) -> int:
        """Return bytes that one embedding needs while it is encoded, estimated: pixels, the inputs and outputs of the
        widest layer, and as much again for the stream, its norms and attention.
        """
        layers = [module for module in self.modules() if isinstance(module, Linear)]
        widest = max(layer.in_features + layer.out_features for layer in layers)
        itemsize = next(self.parameters()).element_size()
        return self.patches_per_embed * (2 * itemsize * widest + _PIXEL_BYTES)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the embeddings of each image, `[num_embeds, hidden_size * (1 + len(deep))]` in the model's dtype, from
        its features, which are on the model's device in the dtype of the file (float32 for pixels).

        The first `hidden_size` columns replace the embeddings of the image's placeholders, after the language model
        has scaled those of the text (Gemma). With deepstack, part i of the others is added to the hidden states after
        decoder layer `VisionSpec.deep[i]`.
        """
        raise NotImplementedError
