"""Aya Vision and Command A Vision: an image is cut into tiles, and the whole image follows if there are several."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.server.media.families.internvl import InternVLProcessor

_START, _END, _BREAK = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"


class AyaVisionProcessor(InternVLProcessor):
    """Cuts images as InternVL does; the text counts the tiles."""

    placeholder: ClassVar[str] = "<image>"
    image_token = "<|IMG_PATCH|>"
    defaults = (224, 16)

    def _side_of_tile(self, config: dict[str, Any], patches: int) -> int:
        return patches // config.get("downsample_factor", 2)

    def _text(self, tiles: int) -> tuple[str, list[int]]:
        parts = [*(f"TILE_{i}" for i in range(1, tiles)), "TILE_GLOBAL"]
        return _START + "".join(f"{part}{self.image_token}" for part in parts) + _END, [self.tokens] * tiles


class Cohere2VisionProcessor(AyaVisionProcessor):
    """The grid of tiles is the one for which the image is enlarged least, or else reduced least."""

    placeholder = "<|IMG_PATCH|>"
    options: ClassVar[frozenset[str]] = frozenset({"crop_to_patches", "max_patches", "detail"})

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any]):
        super().__init__(config, preprocessor)
        self.crops = preprocessor.get("crop_to_patches", True)

    def _grid(self, width: int, height: int, fewest: int, most: int) -> tuple[int, int]:
        grids = [(c, r) for c in range(1, most + 1) for r in range(1, most // c + 1)]

        def worth(grid: tuple[int, int]) -> tuple[bool, float]:
            scale = min(grid[0] * self.side / width, grid[1] * self.side / height)
            return scale >= 1, -scale if scale >= 1 else scale

        return max(sorted(grids, key=lambda grid: grid[0] * grid[1]), key=worth)

    def _text(self, tiles: int) -> tuple[str, list[int]]:
        return _START + f"{self.image_token}{_BREAK}" * tiles + _END, [self.tokens] * tiles
