"""What layers keep per token or per request, and how layers are grouped so that one pool of equal pages serves them
all. Torch-free.

Layers with equal specs keep their blocks alike, so they share block tables: a request has one block list per group of
layers. A page holds `block_size` tokens of each layer of a group, or one state of each; groups are evened out in
layers, so that pages of all groups have one size in bytes. E.g. 5 layers with full attention and 1 with a window, in
groups of one layer: six groups, of which the last gives old blocks back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.worker.messages import CacheGroup

_MAX_PADDING = 0.1  # of the layers of a page, which padding may waste before smaller groups are preferred


@dataclass(frozen=True, slots=True)
class Full:
    """Keys `[num_kv_heads, k_dim]` and values `[num_kv_heads, v_dim]` of every token. Sizes are those of a rank."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one page of one layer."""
        return block_size * self.num_kv_heads * (self.k_dim + self.v_dim) * self.itemsize

    @property
    def row_bytes(self) -> int:
        """A page that other layers use, too, is a multiple of this."""
        return math.lcm(self.k_dim, self.v_dim) * self.itemsize

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("full")


@dataclass(frozen=True, slots=True)
class Window(Full):
    """The same, but a token at position p sees p - size + 1 .. p only, so older blocks are given back."""

    size: int

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("window", self.size)


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector of `width` per token, which all heads share (MLA, arXiv:2405.04434): its first `width - rope_width`
    entries are the values, too.
    """

    width: int
    rope_width: int
    itemsize: int

    def page_bytes(self, block_size: int) -> int:
        return block_size * self.width * self.itemsize

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("full")


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of fixed size per request: tensors of `shapes`, all of `itemsize`."""

    shapes: tuple[tuple[int, ...], ...]
    itemsize: int

    def page_bytes(self, block_size: int) -> int:
        return sum(math.prod(shape) for shape in self.shapes) * self.itemsize

    @property
    def row_bytes(self) -> int:
        return self.itemsize

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("state")


CacheSpec = Full | Window | Latent | State


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`layers[g]` are the indices of the layers of `groups[g]`, at most `layers_per_group` of them."""

    groups: tuple[CacheGroup, ...]
    layers: tuple[tuple[int, ...], ...]
    layers_per_group: int
    specs: tuple[CacheSpec, ...]  # of each layer

    def layer_page_bytes(self, block_size: int) -> int:
        """Bytes that one page has for each layer: what the largest needs, in whole rows of every kind."""
        kinds = set(self.specs)
        largest = max(spec.page_bytes(block_size) for spec in kinds)
        if all(spec.page_bytes(block_size) == largest for spec in kinds):
            return largest
        row = math.lcm(*(spec.row_bytes for spec in kinds))
        return -(-largest // row) * row

    def page_bytes(self, block_size: int, layers: Sequence[int] | None = None) -> int:
        """Bytes of a page on a rank that has `layers`, all by default."""
        return self.num_slabs(layers) * self.layer_page_bytes(block_size)

    def num_slabs(self, layers: Sequence[int] | None = None) -> int:
        """Most layers of one group that a rank with `layers` has: it needs memory for so many per page."""
        if layers is None:
            return self.layers_per_group
        mine = set(layers)
        return max(len(mine.intersection(group)) for group in self.layers)


def plan_cache(specs: Sequence[CacheSpec]) -> CachePlan:
    """Group layers with equal specs, in equal numbers per group.

    All ranks of a pipeline plan for all layers, and so get the same groups.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    size = _group_size([len(layers) for layers in kinds.values()])
    groups, members = [], []
    for spec, layers in kinds.items():
        for start in range(0, len(layers), size):
            groups.append(spec.group)
            members.append(tuple(layers[start : start + size]))
    return CachePlan(tuple(groups), tuple(members), size, tuple(specs))


def _group_size(counts: list[int]) -> int:
    """The largest number of layers per group that wastes little in the last group of each kind.

    E.g. 4 for 22 and 4 layers, 7 for 21 and 7.
    """
    for size in range(min(counts) if len(counts) > 1 else counts[0], 0, -1):
        padded = sum(-(-count // size) * size for count in counts)
        if padded - sum(counts) <= _MAX_PADDING * sum(counts):
            return size
    raise AssertionError("groups of one layer have no padding")
