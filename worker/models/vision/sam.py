"""The vision transformer of SAM (https://arxiv.org/abs/2304.02643) with two more convolutions, as in DeepSeek-OCR.

Images of any size whose sides are multiples of the patch: tables of positions are interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.transformer.vision.layers import PatchEmbedding, linear, named, table

# scores of one call of attention, which bounds the memory of their biases; from 768 queries on, torch on CPU computes
# larger blocks: these are 1024 queries of 12 heads over a page
_SCORES = 48 << 20


@dataclass(frozen=True)
class SamSpec:
    """The sizes of the encoder."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp_size: int = 3072
    image_size: int = 1024  # of the tables of positions
    patch: int = 16
    window: int = 14  # side of the squares of patches within which most layers attend
    global_layers: tuple[int, ...] = (2, 5, 8, 11)  # layers that attend to the whole image
    neck_size: int = 256
    channels: tuple[int, ...] = (512, 1024)  # of the convolutions after the neck, each of which halves the grid
    eps: float = 1e-6


class Sam(nn.Module):
    """Maps images `[B, 3, height, width]` to features `[B, rows, columns, channels[-1]]`, 4 x 4 patches each."""

    def __init__(self, spec: SamSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        size, side = spec.hidden_size, spec.image_size // spec.patch
        self.patch_embed = PatchEmbedding(size, spec.patch, f"{prefix}.patch_embed.proj", bias=True)
        self.positions = table(f"{prefix}.pos_embed", 1, side, side, size)
        self.blocks = nn.ModuleList(
            [SamLayer(spec, i in spec.global_layers, f"{prefix}.blocks.{i}", weights) for i in range(spec.num_layers)]
        )
        self.neck_in = linear(size, spec.neck_size, f"{prefix}.neck.0", weights, bias=False)
        self.norm1 = named(LayerNorm(spec.neck_size, spec.eps), f"{prefix}.neck.1")
        self.norm2 = named(LayerNorm(spec.neck_size, spec.eps), f"{prefix}.neck.3")
        sizes = [spec.neck_size, spec.neck_size, *spec.channels]
        names = ["neck.2", *(f"net_{i + 2}" for i in range(len(spec.channels)))]
        self.convolutions = nn.ParameterList(
            [table(f"{prefix}.{name}.weight", out, into, 3, 3) for name, into, out in zip(names, sizes, sizes[1:])]
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(pixels)
        x = x + resized(self.positions, x.shape[1:3])
        for block in self.blocks:
            x = block(x)
        x = self.norm1(self.neck_in(x.flatten(0, 2)).view(*x.shape[:3], -1))
        same, *halving = self.convolutions
        x = self.norm2(_convolve(x, same, 1))
        for weight in halving:
            x = _convolve(x, weight, 2)
        return x


def _convolve(x: torch.Tensor, weight: torch.Tensor, stride: int) -> torch.Tensor:
    """Convolve x `[B, rows, columns, C]` by 3 x 3."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, stride=stride, padding=1).permute(0, 2, 3, 1).contiguous()


def resized(positions: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Return embeddings `[1, rows, columns, C]` of the positions in a grid of another size."""
    if positions.shape[1:3] == tuple(grid):
        return positions
    wide = positions.float().permute(0, 3, 1, 2)
    wide = F.interpolate(wide, size=tuple(grid), mode="bicubic", antialias=True)
    return wide.permute(0, 2, 3, 1).to(positions.dtype)


class SamLayer(nn.Module):
    """Maps x `[B, rows, columns, C]` to the same shape. Attention is within windows, or to the whole image."""

    def __init__(self, spec: SamSpec, attends_to_all: bool, prefix: str, weights: WeightFormat):
        super().__init__()
        size = spec.hidden_size
        self.num_heads, self.window = spec.num_heads, None if attends_to_all else spec.window
        self.norm1 = named(LayerNorm(size, spec.eps), f"{prefix}.norm1")
        self.norm2 = named(LayerNorm(size, spec.eps), f"{prefix}.norm2")
        self.qkv = linear(size, 3 * size, f"{prefix}.attn.qkv", weights)
        self.proj = linear(size, size, f"{prefix}.attn.proj", weights)
        self.lin1 = linear(size, spec.mlp_size, f"{prefix}.mlp.lin1", weights)
        self.lin2 = linear(spec.mlp_size, size, f"{prefix}.mlp.lin2", weights)
        side = spec.image_size // spec.patch if attends_to_all else spec.window
        shape = 2 * side - 1, size // spec.num_heads
        self.by_row = table(f"{prefix}.attn.rel_pos_h", *shape)
        self.by_column = table(f"{prefix}.attn.rel_pos_w", *shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 2)
        qkv = self.qkv(self.norm1(flat)).view(*x.shape[:3], -1)
        flat = flat + self.proj(self._attend(qkv).flatten(0, 2))
        flat = flat + self.lin2(F.gelu(self.lin1(self.norm2(flat))))
        return flat.view(x.shape)

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Map qkv `[B, rows, columns, 3 * C]` to `[B, rows, columns, C]`."""
        batch, rows, columns, _ = qkv.shape
        side = self.window
        if side is None:
            return self._attend_within(qkv)
        # the windows at the edges reach over it, and their patches attend to the empty patches there
        padded_rows, padded_columns = -(-rows // side) * side, -(-columns // side) * side
        empty = self.qkv(qkv.new_zeros(1, self.qkv.in_features))
        padded = empty.expand(batch, padded_rows, padded_columns, -1).clone()
        padded[:, :rows, :columns] = qkv
        windows = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)  # [B, R, C, side, side, ...]
        out = self._attend_within(windows.flatten(0, 2)).view(*windows.shape[:5], -1)
        return out.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :columns]

    def _attend_within(self, qkv: torch.Tensor) -> torch.Tensor:
        """Map qkv `[N, rows, columns, 3 * C]` to `[N, rows, columns, C]`: attention within each of N grids."""
        q, k, v = qkv.unflatten(3, (3, self.num_heads, -1)).permute(3, 0, 4, 1, 2, 5)
        return relative_attention(q, k, v, self.by_row, self.by_column).permute(0, 2, 3, 1, 4).flatten(3)


def relative_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor
) -> torch.Tensor:
    """Attend within N grids, `[N, heads, rows, columns, D]` each. The score of q and k at another row and column
    grows by the products of q and the embeddings of both distances: `by_row` and `by_column`, `[2 * side - 1, D]`.

    The biases of all scores are never in memory at once.
    """
    num, heads, rows, columns, _ = q.shape
    of_rows = q @ _distances(by_row, rows).transpose(1, 2)  # [N, heads, rows, columns, rows of k]
    of_columns = (q.transpose(2, 3) @ _distances(by_column, columns).transpose(1, 2)).transpose(2, 3)
    k, v = k.flatten(2, 3), v.flatten(2, 3)
    of_row = heads * columns * rows * columns  # scores of the queries in one row of one grid
    num_rows = min(rows, max(1, _SCORES // of_row))
    num_grids = min(num, max(1, _SCORES // (of_row * rows)))
    biases = q.new_empty(num_grids, heads, num_rows, columns, rows, columns)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for n in range(0, num, num_grids):
        grids = slice(n, n + num_grids)
        for r in range(0, rows, num_rows):
            part = (grids, slice(None), slice(r, r + num_rows))
            queries = q[part].flatten(2, 3)
            bias = biases[: len(queries), :, : queries.shape[2] // columns]
            torch.add(of_rows[part].unsqueeze(-1), of_columns[part].unsqueeze(-2), out=bias)
            mask = bias.flatten(4, 5).flatten(2, 3)
            out[part] = F.scaled_dot_product_attention(queries, k[grids], v[grids], mask).view(out[part].shape)
    return out


def _distances(embeddings: torch.Tensor, side: int) -> torch.Tensor:
    """Return the embedding of the distance of each of `side` queries to each of `side` keys, `[side, side, D]`."""
    if len(embeddings) != 2 * side - 1:
        wide = embeddings.float().T.unsqueeze(0)
        embeddings = F.interpolate(wide, size=2 * side - 1, mode="linear")[0].T.to(embeddings.dtype)
    position = torch.arange(side, device=embeddings.device)
    return embeddings[position[:, None] - position + side - 1]
