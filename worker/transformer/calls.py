"""Arguments of a step: of a pipeline stage's layers and of one layer.

T tokens of all requests of the step are concatenated. `needed_rows` are ascending indices `[S]` of the tokens whose
result is needed, never empty; None means all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.worker.attention.base import GroupedMetadata
from quire.worker.layers.rotary import Rotation

if TYPE_CHECKING:
    from quire.worker.attention.cross_weights import CrossWeights
    from quire.worker.transformer.vision.image_embeds import ImageEmbeds


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoder's output for the requests that begin in a step, one after another, and the slots of their keys and
    values in the caches of the group "cross".
    """

    hidden: torch.Tensor  # [M, H]
    slots: torch.Tensor  # [M] int64


@dataclass(frozen=True, slots=True)
class StageCall:
    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] or [3, T]
    attn: GroupedMetadata
    hidden: torch.Tensor | None = None  # the previous stage's result, which may be overwritten
    needed_rows: torch.Tensor | None = None  # on the last stage
    images: ImageEmbeds | None = None
    token_types: torch.Tensor | None = None  # [T]: 1 for tokens of a pair's second text, by default 0
    encoded: Encoded | None = None
    cross_weights: CrossWeights | None = None  # of requests whose cross-attention is asked for


@dataclass(frozen=True, slots=True)
class LayerCall:
    rotation: Rotation | None  # None: the layer has no rotary embedding
    attn: GroupedMetadata
    needed_rows: torch.Tensor | None = None  # in the last layer
    inputs: torch.Tensor | None = None  # the layer's own inputs [T, size] (per_layer.py)
    encoded: Encoded | None = None  # for requests that begin in this step, for layers that attend to it
    cross_weights: CrossWeights | None = None

    def needed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x `[T, _]` whose result is needed."""
        return x if self.needed_rows is None else x[self.needed_rows]
