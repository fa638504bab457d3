"""The vision encoder of Qwen2-VL."""

from __future__ import annotations

from typing import Any

from quire.worker.models.vision.qwen_vl import QwenVLTower
from quire.worker.transformer.vision.layers import EncoderSpec, LayerNames


class Qwen2VLTower(QwenVLTower):
    defaults = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["embed_dim"],
            intermediate_size=int(vision["embed_dim"] * vision["mlp_ratio"]),
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            act=vision["hidden_act"],
            eps=1e-6,
            names=LayerNames("norm1", "attn", ("qkv",), "proj", "norm2"),
        )

    @property
    def out_size(self) -> int:
        return self.vision["hidden_size"]
