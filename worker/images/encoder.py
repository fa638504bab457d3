"""Encode images and keep their embeddings, as the engine's `EncoderCache` accounts for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from safetensors.torch import load_file

from quire.worker.messages import MediaItem
from quire.worker.platforms.base import Platform, is_out_of_memory
from quire.worker.transformer.vision.tower import VisionTower

logger = logging.getLogger(__name__)

Features = dict[str, torch.Tensor]


class ImageEncoder:
    """The encoder cache of a worker: `embeddings` holds the result of `tower` for each image, by key."""

    def __init__(self, tower: VisionTower, platform: Platform) -> None:
        self.tower, self.platform = tower, platform
        self.embeddings: dict[str, torch.Tensor] = {}

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.embeddings.pop(key, None)  # absent if it could not be encoded

    def encode(self, items: Sequence[MediaItem]) -> dict[str, str]:
        """Encode images together, and one by one if that fails. Returns the errors of those that failed, by key."""
        errors: dict[str, str] = {}
        readable: list[tuple[MediaItem, Features]] = []
        for item in items:
            try:
                readable.append((item, self._read(item)))
            except Exception as error:  # any error in the file concerns this image only
                errors[item.key] = _describe(item, "read", error)
        if not readable:
            return errors
        if self.tower.one_by_one:
            return errors | self._encode_alone(readable)
        try:
            self._encode(readable)
        except Exception as error:
            if len(readable) == 1:
                return errors | {readable[0][0].key: self._failed(readable[0][0], error)}
            logger.warning("%d images cannot be encoded together, trying one by one: %s", len(readable), error)
        else:
            return errors
        self.platform.release_memory()
        return errors | self._encode_alone(readable)

    def _encode_alone(self, images: Sequence[tuple[MediaItem, Features]]) -> dict[str, str]:
        """Encode one image after another. Returns the errors of those that failed."""
        errors: dict[str, str] = {}
        for one in images:
            try:
                self._encode([one])
            except Exception as error:
                errors[one[0].key] = self._failed(one[0], error)
        return errors

    def _read(self, item: MediaItem) -> Features:
        device = self.platform.device
        return {name: tensor.to(device) for name, tensor in load_file(item.path).items()}

    def _encode(self, images: Sequence[tuple[MediaItem, Features]]) -> None:
        embeddings = self.tower.encode([features for _, features in images])
        for (item, _), found in zip(images, embeddings, strict=True):
            if len(found) != item.num_embeds:
                raise ValueError(f"its features make {len(found)} embeddings, but it has {item.num_embeds} tokens")
        for (item, _), found in zip(images, embeddings):
            # a copy, because a slice would keep the embeddings of all images
            self.embeddings[item.key] = found.clone() if len(images) > 1 else found

    def _failed(self, item: MediaItem, error: Exception) -> str:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            self.platform.release_memory()
            return "the device has not enough memory to encode it: send a smaller image"
        return _describe(item, "encoded", error)


def _describe(item: MediaItem, what: str, error: Exception) -> str:
    logger.warning("image %s in %s cannot be %s", item.key, item.path, what, exc_info=error)
    return f"it cannot be {what}: {error if isinstance(error, ValueError) else 'the log has the reason'}"
