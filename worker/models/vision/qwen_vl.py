"""Common parts of the vision encoders of Qwen 2, 2.5 and 3: images of any size, and videos, as patches in groups of
neighbours that make one embedding.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN, PLAIN_WEIGHTS, ColumnParallelLinear, Part, Shard, WeightFormat
from quire.worker.layers.norm import Norm
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, activation, linear
from quire.worker.transformer.vision.tower import VisionTower

Grid = tuple[int, int, int]  # frames after grouping, rows and columns of patches


class PatchEmbedding(ColumnParallelLinear):
    """Maps patches `[T, 3, F, patch * patch]` to `[T, C]`: a convolution over `frames` frames whose stride is its size.
    With F = 1 the frame stands for all of them.
    """

    name: ClassVar[str] = "visual.patch_embed.proj"

    def __init__(self, size: int, patch: int, frames: int, bias: bool):
        self.patch, self.frames = patch, frames
        self.dtype = torch.get_default_dtype()
        super().__init__(3 * frames * patch * patch, [Shard(self.name, size, 0, size)], bias, PLAIN)

    def weight_parts(self) -> list[Part]:
        shape = (self.out_features, 3, self.frames, self.patch, self.patch)
        return [Part(f"{self.name}.weight", shape, view=partial(torch.flatten, start_dim=1))]

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return super().forward(patches.expand(-1, -1, self.frames, -1).flatten(1).to(self.dtype))


class Merger(nn.Module):
    """Maps features of patches `[T, C]` to embeddings `[T / group, size]`. The norm is that of a patch, or of all
    patches of a group together if it has their size.
    """

    def __init__(self, norm: Norm, group: int, size: int, names: tuple[str, str], hidden: int, weights: WeightFormat):
        super().__init__()
        self.norm, self.group, joined = norm, group, group * hidden
        self.joins_first = len(norm.weight) == joined
        self.linear_1 = linear(joined, joined, names[0], weights)
        self.linear_2 = linear(joined, size, names[1], weights)
        self.activate = activation("gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = (-1, self.group * x.shape[-1])
        x = self.norm(x.reshape(groups)) if self.joins_first else self.norm(x).reshape(groups)
        return self.linear_2(self.activate(self.linear_1(x)))


class QwenVLTower(VisionTower):
    """`pixel_values` of an image is `[T, 3, F, patch * patch]`, frame by frame, in the order of embeddings, where the
    `merge` x `merge` patches of an embedding are neighbours. F is 1 for an image and `temporal_patch_size` for a video.
    `grid` `[3]` has the frames (F of them count as one), rows and columns of patches.
    """

    prefixes = ("visual.",)
    defaults: ClassVar[dict[str, Any]]  # of vision_config
    blocks: ClassVar[str] = "visual.blocks"  # where the checkpoint has the layers
    patch_embedding: ClassVar[type[PatchEmbedding]] = PatchEmbedding
    patch_bias: ClassVar[bool] = False
    video_token_id: ClassVar[int | None] = 151656  # where config.json names none
    theta: ClassVar[float] = 10000.0  # base of the rotary embedding, where config.json names none

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        image_token_id = read_image_token_id({"image_token_id": 151655} | config)
        video_token_id = config.get("video_token_id", cls.video_token_id)
        return VisionSpec(architecture, config, image_token_id, mrope=True, video_token_id=video_token_id)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.vision = vision = self.defaults | config["vision_config"]
        spec = self.encoder_spec(vision)
        self.merge, self.head_dim = vision["spatial_merge_size"], spec.hidden_size // spec.num_heads
        self.patches_per_embed = self.merge**2
        shape = vision["patch_size"], vision["temporal_patch_size"]
        self.patches = self.patch_embedding(spec.hidden_size, *shape, self.patch_bias)
        self.encoder = Encoder(spec, self.blocks, weights)
        self.merger = self.make_merger(spec, weights)

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        raise NotImplementedError

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        norm, names = spec.make_norm("visual.merger.ln_q"), ("visual.merger.mlp.0", "visual.merger.mlp.2")
        return Merger(norm, self.merge**2, self.out_size, names, spec.hidden_size, weights)

    @property
    def out_size(self) -> int:
        return self.vision["out_hidden_size"]

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        grids: list[Grid] = [tuple(image["grid"].tolist()) for image in images]
        x = torch.cat([self.patches(image["pixel_values"]) for image in images])
        cos_sin = torch.cat([self.rotation(grid, x.device) for grid in grids])
        return list(self.embed(x, cos_sin, grids).split([prod(grid) // self.merge**2 for grid in grids]))

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Map embedded patches `[T, C]` to the embeddings of all images. Patches attend to those of their frame."""
        return self.merger(self.encoder(x, frame_lengths(grids), cos_sin))

    def rotation(self, grid: Grid, device: torch.device) -> torch.Tensor:
        """Return the rows of `apply_rotary`."""
        frames, rows, columns = grid
        half = self.head_dim // 2
        theta = (self.vision.get("rope_parameters") or {}).get("rope_theta") or self.theta
        frequencies = 1.0 / theta ** (torch.arange(0, half, 2, device=device, dtype=torch.float32) / half)
        of_row = torch.arange(rows, device=device)[:, None, None] * frequencies
        of_column = torch.arange(columns, device=device)[None, :, None] * frequencies
        shape = (rows, columns, -1)
        angles = in_groups(self.angles(of_row.expand(shape), of_column.expand(shape)), self.merge)
        return torch.cat((angles.cos(), angles.sin()), -1).repeat(frames, 1)

    def angles(self, of_row: torch.Tensor, of_column: torch.Tensor) -> torch.Tensor:
        """Join the angles by which a patch's row and its column turn q and k: here the first half of the frequencies
        turns by the row.
        """
        return torch.cat((of_row, of_column), -1)


def frame_lengths(grids: list[Grid]) -> list[int]:
    """Return the number of patches of each frame."""
    return [rows * columns for frames, rows, columns in grids for _ in range(frames)]


def stretched(learned: torch.Tensor, side: int, grid: Grid, merge: int, *, align_corners: bool) -> torch.Tensor:
    """Return the embeddings of the positions of a grid `[T, C]`: those that were learned of a square `[side * side,
    C]`.
    """
    frames, rows, columns = grid
    square = learned.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    found = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=align_corners)
    return in_groups(found[0].permute(1, 2, 0), merge).to(learned.dtype).repeat(frames, 1)


def in_groups(x: torch.Tensor, merge: int) -> torch.Tensor:
    """Return patches of a grid `[rows, columns, C]`, those of a group after one another: `[rows * columns, C]`."""
    rows, columns, size = x.shape
    return x.reshape(rows // merge, merge, columns // merge, merge, size).transpose(1, 2).reshape(-1, size)
