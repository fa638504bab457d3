"""Facts about a model's encoder of images or audio for the worker and the scheduler. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Facts about the images that a model reads, made by `VisionTower.read_spec`."""

    architecture: str  # for the wrapper, a key of `wrappers.WRAPPERS`
    config: dict[str, Any]  # the whole config.json
    image_token_id: int  # the placeholder whose embeddings the images replace
    # whether the tokens of an image attend to each other in both directions, so that one step computes them all
    bidirectional: bool = False
    full_layers_causal: bool = False  # whether they do so only in layers with a window
    # decoder layers after which a part of their own is added to the hidden states of image tokens (deepstack)
    deep: tuple[int, ...] = ()
    mrope: bool = False  # whether positions have three axes; `RopeSpec.axes` says how they are used
    # if the decoder attends to the encoder's output: embeddings of each audio; 0: embeddings replace placeholders
    cross: int = 0
    audio: bool = False  # whether it reads audio instead of images
    video_token_id: int | None = None  # the placeholder of videos, if they have their own

    def width(self, hidden_size: int) -> int:
        """Return the entries of one embedding that the encoder returns."""
        return hidden_size * (1 + len(self.deep))

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Return the token ids that embeddings replace."""
        return (self.image_token_id,) if self.video_token_id is None else (self.image_token_id, self.video_token_id)


def read_image_token_id(config: dict[str, Any]) -> int:
    """Return the id of the image token in a config.json. Raises ValueError if it names none."""
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token_id, int):
        raise ValueError("config.json has no image_token_id (or image_token_index)")
    return token_id
