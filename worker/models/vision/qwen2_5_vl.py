"""The vision encoder of Qwen2.5-VL: in most layers patches attend to those of their window only."""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.models.vision.qwen_vl import Grid, QwenVLTower, frame_lengths
from quire.worker.transformer.vision.layers import EncoderSpec, LayerNames


class Qwen2_5VLTower(QwenVLTower):
    defaults = {
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    }

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            act=vision["hidden_act"],
            eps=1e-6,
            norm="rms",
            names=LayerNames(
                "norm1", "attn", ("qkv",), "proj", "norm2", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
            ),
        )

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Compute the patches window by window in all layers, in groups; the windows of a frame follow one another."""
        side = self.vision["window_size"] // self.merge // self.vision["patch_size"]
        windows = windows_of([(t, rows // self.merge, columns // self.merge) for t, rows, columns in grids], side)
        order, unit = torch.cat(windows).to(x.device), self.merge**2
        x, cos_sin = (values.unflatten(0, (-1, unit))[order].flatten(0, 1) for values in (x, cos_sin))
        lengths = frame_lengths(grids), [len(window) * unit for window in windows]
        for i, layer in enumerate(self.encoder.layers):
            x = layer(x, lengths[i not in self.vision["fullatt_block_indexes"]], cos_sin)
        return self.merger(x)[order.argsort()]


def windows_of(grids: list[Grid], side: int) -> list[torch.Tensor]:
    """Return the indices of the groups of patches in each window of `side` x `side` groups. `grids` counts groups.

    Those of a frame are sorted by size, so that windows of equal size are attended to together.
    """
    windows: list[torch.Tensor] = []
    start = 0
    for frames, rows, columns in grids:
        indices = torch.arange(start, start + frames * rows * columns, device="cpu").view(frames, rows, columns)
        for frame in indices:
            parts = [part.flatten() for band in frame.split(side) for part in band.split(side, 1)]
            windows += sorted(parts, key=len)
        start += indices.numel()
    return windows
