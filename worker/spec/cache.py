"""Cache specifications of layers, and how layers are grouped so that one pool of equal pages serves them all.
Torch-free.

Layers with equal specs use the same block table: a request has one block list per group of layers. A page holds
`block_size` tokens of each layer of a group. Groups have about equal numbers of layers, so that the pages of all groups
have one size in bytes. E.g. 5 layers with full attention and 1 with a window form six groups of one layer; the last
group releases old blocks.

All layers with a recurrent state form one more group. Its pages, which hold a state of each layer, are separate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.worker.messages import CacheGroup

_MAX_PADDING = 0.1  # maximum fraction of padded layers; beyond it, smaller groups are preferred


@dataclass(frozen=True, slots=True)
class Full:
    """Keys `[num_kv_heads, k_dim]` and values `[num_kv_heads, v_dim]` of every token, and `scale_bytes` per head for
    each of the scales of its key and value. Sizes are per rank.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int
    scale_bytes: int = field(default=0, kw_only=True)
    # tokens of the output attend to the prompt and to this number of last tokens of the output; 0: to all
    output_window: int = field(default=0, kw_only=True)

    def page_bytes(self, block_size: int) -> int:
        """Return bytes of one page of one layer."""
        return block_size * self.num_kv_heads * ((self.k_dim + self.v_dim) * self.itemsize + 2 * self.scale_bytes)

    @property
    def row_bytes(self) -> int:
        """Return the granularity of shared pages: the size in bytes of a page that other layers share is a multiple of
        this.
        """
        return math.lcm(self.k_dim * self.itemsize, self.v_dim * self.itemsize, self.scale_bytes or 1)

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("full", self.output_window)


@dataclass(frozen=True, slots=True)
class Window(Full):
    """Like `Full`, but a token at position p attends to p - size + 1 .. p only, so older blocks are released."""

    size: int

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("window", self.size)


@dataclass(frozen=True, slots=True)
class Chunk(Full):
    """Like `Full`, but a token attends only to tokens of its chunk: positions are divided into chunks of `size`."""

    size: int

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("chunk", self.size)


@dataclass(frozen=True, slots=True)
class Cross(Full):
    """Keys and values of the `length` positions of an encoder's output, the same for all tokens of a request."""

    length: int

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("cross", self.length)


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector of `width` per token, shared by all heads (MLA, arXiv:2405.04434); its first `width - rope_width`
    entries are also the values. `scale_bytes` is the size of the scale of each of the two parts. With a window, older
    blocks are released.
    """

    width: int
    rope_width: int
    itemsize: int
    scale_bytes: int = 0
    window: int = 0

    def page_bytes(self, block_size: int) -> int:
        return block_size * (self.width * self.itemsize + 2 * self.scale_bytes)

    @property
    def row_bytes(self) -> int:
        return math.lcm(self.width * self.itemsize, 2 * self.scale_bytes or 1)

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("window", self.window) if self.window else CacheGroup("full")


@dataclass(frozen=True, slots=True)
class Compressed:
    """One vector of `width` per `rate` consecutive tokens (`layers/sparse/`), in the block of the last of them. Several
    layers share a page that is large enough for them.
    """

    width: int
    rate: int
    itemsize: int
    scale_bytes: int = 0  # for each of two parts, as of `Latent`

    def slots(self, block_size: int) -> int:
        """Return the largest number of vectors in a block."""
        return -(-block_size // self.rate)

    def page_bytes(self, block_size: int) -> int:
        return self.slots(block_size) * (self.width * self.itemsize + 2 * self.scale_bytes)

    @property
    def row_bytes(self) -> int:
        return math.lcm(self.itemsize, self.scale_bytes or 1)

    @property
    def group(self) -> CacheGroup:
        return CacheGroup("full")


@dataclass(frozen=True, slots=True)
class CompressedSizes:
    """Attention to a window and to compressed keys (DeepSeek V4), the same in all layers; sizes of the whole model."""

    rank: int  # of the latents of queries
    rope_dim: int  # last entries of a head, which are rotated
    groups: int  # of heads, each with its own projection of attended values
    group_rank: int  # width of that projection of a group
    rate: int = 0  # tokens per compressed key, 0: none
    overlap: bool = False  # whether a compressed key also has a part of each token of the `rate` before
    # an index chooses `top` compressed keys for each token by `index_heads` heads of `index_dim`; 0: all are seen
    top: int = 0
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """An index that chooses keys (`layers/sparse/chosen.py`) or blocks of them (`layers/sparse/blocks.py`). Sizes are
    those of the whole model.
    """

    top: int  # keys per token
    heads: int
    dim: int  # of a head and of a key
    rope_first: bool = True  # whether the rotary part of a head is its first entries, not its last
    interleaved: bool = False  # whether the rotary embedding rotates neighbouring entries, not halves
    eps: float = 1e-6  # for the norm of the keys
    pool: int = 1  # consecutive tokens that are chosen together, by a mean of their keys
    block: int = 0  # tokens of a block that is chosen as a whole for a KV head; 0: keys are chosen for all heads
    local: int = 0  # number of last blocks that are always chosen
    means: bool = False  # whole blocks are chosen by the mean of their keys, for all heads, and always the last tokens
    angles: int = 0  # entries of cos and sin that follow a key, if its position does not tell its angles
    source: int | None = None  # an earlier layer, whose choice this one uses; None: it chooses by itself

    @property
    def width(self) -> int:
        """Return the entries of the cache per token: a key and, if keys are pooled, its weights in the mean."""
        return self.dim * (1 if self.pool == 1 else 2) + self.angles


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention (`layers/mla.py`), the same for all heads."""

    rank: int  # R, of the latent
    nope_dim: int  # N, of a head's keys without rotary embedding
    rope_dim: int  # P, of its keys with it
    v_dim: int  # V, of its values

    @property
    def width(self) -> int:
        """Return the entries of the cache per token."""
        return self.rank + self.rope_dim

    def expands(self, num_queries: int, length: int) -> bool:
        """Return whether the last `num_queries` of `length` tokens take fewer multiplications expanded than absorbed.

        E.g. with R, N, P, V = 512, 128, 64, 128 a whole prompt, or 176 tokens after 50 000.
        """
        per_token = (self.nope_dim + self.v_dim) * self.rank  # expands a cached token, or absorbs W_k and W_v into one
        pairs = num_queries * (length - num_queries) + num_queries * (num_queries + 1) // 2
        absorbed = num_queries * per_token + pairs * (2 * self.rank + self.rope_dim)
        expanded = length * per_token + pairs * (self.nope_dim + self.rope_dim + self.v_dim)
        return num_queries > 1 and expanded < absorbed


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of fixed size per request: tensors of `shapes`, in float32. Sizes are per rank."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.shapes)


CacheSpec = Full | Window | Chunk | Cross | Latent | Compressed


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`layers[g]` are the indices of the layers of `groups[g]`, at most `layers_per_group` of them, except in the last
    group, that of the layers with states.
    """

    groups: tuple[CacheGroup, ...]
    layers: tuple[tuple[int, ...], ...]
    layers_per_group: int
    specs: tuple[CacheSpec | None, ...]  # one per layer, None for a layer without a cache of its own
    states: tuple[State | None, ...] = ()  # one per layer, None for a layer without a state; () if there are none
    # for layers that draft tokens, whose indices follow those of the others: each has memory of its own in the pages of
    # the group `draft_group`, or is a layer of a group of `layers` if that is None
    drafting: tuple[CacheSpec | None, ...] = ()
    draft_group: int | None = 0
    sharing: tuple[int, ...] = ()  # number of layers of each group that share the page of one layer; () if it is 1

    def spec_of(self, layer: int) -> CacheSpec | None:
        return (self.specs + self.drafting)[layer]

    def layer_page_bytes(self, block_size: int) -> int:
        """Return bytes that one page reserves per layer: the size of the largest layer, rounded up to whole rows of
        every kind.
        """
        kinds = set(self.specs if self.draft_group is not None else self.specs + self.drafting) - {None}
        if not kinds:
            return 0
        largest = max(spec.page_bytes(block_size) for spec in kinds)
        if all(spec.page_bytes(block_size) == largest for spec in kinds):
            return largest
        row = math.lcm(*(spec.row_bytes for spec in kinds))
        return -(-largest // row) * row

    def page_bytes(self, block_size: int, layers: Sequence[int] | None = None) -> int:
        """Return bytes of a page on a rank that has `layers`, by default all."""
        apart = self.drafting if self.draft_group is not None else ()
        drafting = sum(spec.page_bytes(block_size) for spec in apart if spec)
        return self.num_slabs(layers) * self.layer_page_bytes(block_size) + drafting

    def num_slabs(self, layers: Sequence[int] | None = None) -> int:
        """Return the maximum number of layers of one group among `layers`: a rank needs memory for that many layers per
        page.
        """
        if layers is None:
            return self.layers_per_group
        mine = {*layers, *range(len(self.specs), len(self.specs) + len(self.drafting))}
        counts = (
            -(-len(mine.intersection(members)) // self.per_page(g))
            for g, members in enumerate(self.layers)
            if self.groups[g].kind != "state"
        )
        return max(counts, default=0)

    def per_page(self, group: int) -> int:
        """Return the number of layers of a group that share the page of one layer."""
        return self.sharing[group] if self.sharing else 1

    def state_bytes(self, layers: Sequence[int] | None = None) -> int:
        """Return bytes of a page with the states of all layers, or on a rank that has `layers`, of these."""
        return sum(state.num_bytes for i, state in enumerate(self.states) if state and (layers is None or i in layers))


def plan_cache(
    specs: Sequence[CacheSpec | None], states: Sequence[State | None] = (), block_size: int = 16
) -> CachePlan:
    """Group layers with equal specs, with equal numbers of layers per group, and those with states. Layers with
    compressed keys share pages: a group has more of them.

    All ranks of a pipeline plan for all layers, so they get the same groups.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            kinds.setdefault(spec, []).append(layer)
    largest = max((spec.page_bytes(block_size) for spec in kinds), default=0)
    shared = {spec: largest // spec.page_bytes(block_size) if isinstance(spec, Compressed) else 1 for spec in kinds}
    counts = [-(-len(layers) // shared[spec]) for spec, layers in kinds.items()]
    fewest = counts if max(shared.values(), default=1) == 1 else [max(counts)]  # a group may have a part of its pages
    size = _group_size(counts, min(fewest)) if kinds else 0
    groups, members, sharing = [], [], []
    for spec, layers in kinds.items():
        number = size * shared[spec]
        for start in range(0, len(layers), number):
            groups.append(spec.group)
            members.append(tuple(layers[start : start + number]))
            sharing.append(shared[spec])
    if any(states):
        groups.append(CacheGroup("state"))
        members.append(tuple(i for i, state in enumerate(states) if state))
        sharing.append(1)
    return CachePlan(
        tuple(groups),
        tuple(members),
        size,
        tuple(specs),
        tuple(states) if any(states) else (),
        sharing=tuple(sharing) if max(sharing, default=1) > 1 else (),
    )


def add_drafting(plan: CachePlan, specs: Sequence[CacheSpec | None]) -> CachePlan:
    """Give layers that draft tokens a place in the blocks of a group that keeps all tokens.

    They use the blocks of that group, so a prefix cache hit covers them, too. Raises ValueError without such
    a group.
    """
    for g, group in enumerate(plan.groups):
        if group.kind == "full" and not group.window:
            return replace(plan, drafting=tuple(specs), draft_group=g)
    raise ValueError(
        "--speculative-config: no layer of the model attends to all tokens: a draft model's keys would have no blocks"
    )


def add_heads(plan: CachePlan, spec: CacheSpec, count: int) -> CachePlan:
    """Give the layers of `count` prediction heads a place. Those with a window get groups of their own: head i computes
    a token up to i steps later than the model, so that its window ends up to i tokens earlier.
    """
    if spec.group.kind != "window":
        return add_drafting(plan, [spec] * count)
    size, first = plan.layers_per_group, len(plan.specs)
    members = [tuple(range(first + i, first + min(i + size, count))) for i in range(0, count, size)]
    group = CacheGroup("window", spec.group.window + count - 1)
    place = len(plan.groups) - bool(plan.states)  # states are the last group
    return replace(
        plan,
        groups=(*plan.groups[:place], *[group] * len(members), *plan.groups[place:]),
        layers=(*plan.layers[:place], *members, *plan.layers[place:]),
        sharing=plan.sharing and (*plan.sharing[:place], *[1] * len(members), *plan.sharing[place:]),
        drafting=(spec,) * count,
        draft_group=None,
    )


def _group_size(counts: list[int], most: int) -> int:
    """Return the largest number of layers per group, up to `most`, that wastes little in the last group of each kind.

    E.g. 4 for 22 and 4 layers, 7 for 21 and 7.
    """
    for size in range(most, 0, -1):
        padded = sum(-(-count // size) * size for count in counts)
        if padded - sum(counts) <= _MAX_PADDING * sum(counts):
            return size
    raise AssertionError("groups of one layer have no padding")
