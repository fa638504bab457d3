"""The vision encoder of Kimi K2.5 (MoonViT, https://arxiv.org/abs/2504.07491): images of any size as patches, four of
which make an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.layers.views import RotaryRows, RowOrder
from quire.worker.models.vision import qwen_vl
from quire.worker.models.vision.qwen_vl import Grid, Merger, QwenVLTower, frame_lengths, in_groups
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import EncoderSpec, LayerNames, named, rename_parts, table

_TOWER, _PROJECTOR = "vision_tower", "mm_projector"
_EPS = 1e-5  # of the encoder's norms
_NAMES = LayerNames("norm0", "attn", ("wqkv",), "wo", "norm1", ("mlp.fc0",), "mlp.fc1")
# names of the settings in Kimi's own files -> transformers'
_ALIASES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}


class PatchEmbedding(qwen_vl.PatchEmbedding):
    name = f"{_TOWER}.patch_embed.proj"

    def weight_parts(self) -> list[Part]:
        shape = (self.out_features, 3, self.patch, self.patch)
        return [Part(f"{self.name}.weight", shape, view=partial(torch.flatten, start_dim=1))]


@dataclass(frozen=True, slots=True)
class _QueriesAndKeys(RowOrder):
    """Reorders the rows of q and k, which v follows."""

    rows: RotaryRows

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        q, k, v = tensor.chunk(3)
        return torch.cat((self.rows(q), self.rows(k), v))


def settings(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `vision_config` by transformers' names. Raises ValueError if patches are not merged in squares."""
    found = {_ALIASES.get(name, name): value for name, value in vision.items() if value is not None}
    merge = set(found.pop("merge_kernel_size", (2, 2)))
    if len(merge) != 1:
        raise ValueError(f"vision_config.merge_kernel_size {sorted(merge)} is not supported: only squares are")
    return found | {"spatial_merge_size": merge.pop()}


class KimiK25Tower(QwenVLTower):
    """Features as of `QwenVLTower`, of images; positions in the text have one axis."""

    prefixes = (f"{_TOWER}.", f"{_PROJECTOR}.")
    blocks = f"{_TOWER}.encoder.blocks"
    patch_embedding = PatchEmbedding
    patch_bias = True
    defaults = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 14,
        "temporal_patch_size": 1,
        "pos_emb_height": 64,
        "pos_emb_width": 64,
    }

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        token_id = config.get("media_placeholder_token_id", 163605)
        return VisionSpec(architecture, config, read_image_token_id({"image_token_id": token_id} | config))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        self.config = config
        vision = settings(config["vision_config"])
        super().__init__(config | {"vision_config": vision}, weights)
        size, sides = self.vision["hidden_size"], (self.vision["pos_emb_height"], self.vision["pos_emb_width"])
        self.positions = table(f"{_TOWER}.patch_embed.pos_emb.weight", *sides, size)
        self.norm = named(LayerNorm(size, _EPS), f"{_TOWER}.encoder.final_layernorm")
        rename_parts(self, {".attn.": "."})
        view = _QueriesAndKeys(RotaryRows(self.head_dim, self.head_dim, interleaved=True))
        for parameter in self.encoder.parameters():
            parameter.parts = [replace(p, view=view) if ".wqkv." in p.name else p for p in parameter.parts]

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec.read(vision, eps=_EPS, names=_NAMES)

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        eps = self.config.get("projection_layer_norm_eps", self.vision.get("projector_ln_eps", 1e-5))
        norm = named(LayerNorm(spec.hidden_size, eps), f"{_PROJECTOR}.pre_norm")
        names = f"{_PROJECTOR}.proj.0", f"{_PROJECTOR}.proj.2"
        return Merger(norm, self.merge**2, text_part(self.config)["hidden_size"], names, spec.hidden_size, weights)

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        x = x + torch.cat([self._positions(grid) for grid in grids])
        return self.merger(self.norm(self.encoder(x, frame_lengths(grids), cos_sin)))

    def _positions(self, grid: Grid) -> torch.Tensor:
        """Return the embeddings of the positions of a grid `[T, C]`: those that were learned, interpolated."""
        learned = self.positions.float().permute(2, 0, 1)[None]
        found = F.interpolate(learned, grid[1:], mode="bicubic", align_corners=False)
        return in_groups(found[0].permute(1, 2, 0), self.merge).to(self.positions.dtype)

    def angles(self, of_row: torch.Tensor, of_column: torch.Tensor) -> torch.Tensor:
        return torch.stack((of_column, of_row), -1).flatten(-2)
