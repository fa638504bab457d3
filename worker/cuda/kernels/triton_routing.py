"""The routing of a mixture-of-experts layer in Triton: one kernel chooses the experts of each token, one sorts pairs of
tokens and experts into tiles of rows.

The torch twin of the first is `layers.routing.route`. Neither needs memory that another kernel has cleared, and both
are the same launches for any routing, so that a step can be recorded as a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.worker.layers.routing import route as torch_route

if TYPE_CHECKING:
    from quire.worker.spec.moe import RoutingSpec

_SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}
_WEIGHTS = {"scores": 0, "normalized": 1, "softmax": 2, "sigmoid": 3}


def route(
    spec: RoutingSpec, logits: torch.Tensor, correction: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `layers.routing.route` in one launch. Among equal scores the first experts are chosen; a row with NaN gets ids
    of existing experts.
    """
    if not spec.has_kernels:
        return torch_route(spec, logits, correction, bias)
    tokens, num = logits.shape
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, spec.top_k, dtype=torch.int64, device=logits.device)
    groups = spec.num_groups if spec.bounds_groups else 1
    block_g, block_s = triton.next_power_of_2(groups), triton.next_power_of_2(num // groups)
    _route_kernel[(tokens,)](
        logits, correction, bias, weights, ids, logits.stride(0), spec.scale, spec.epsilon, SIZE=num // groups,
        GROUPS=groups, TOP_GROUPS=spec.top_groups, GROUP_BEST=spec.group_best, TOP_K=spec.top_k, BLOCK_G=block_g,
        BLOCK_S=block_s, BLOCK_K=triton.next_power_of_2(spec.top_k), SCORES=_SCORES[spec.scores],
        WEIGHTS=_WEIGHTS[spec.weights], num_warps=1 if block_g * block_s <= 256 else 4,
    )  # fmt: skip
    return weights, ids


def sort_by_expert(
    ids: torch.Tensor, first: int, num_experts: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (pairs, experts, most tiles): tile i < `experts[most]` consists of the pairs `pairs[i * tile : (i + 1) *
    tile]` of expert `experts[i]` of the stack, which begins with the expert `first`. A pair is token * k + choice; the
    number of all pairs marks padding. Entries of later tiles are undefined.

    Every expert's program counts the pairs of all experts and stores its own, so that there is one launch and no atomic
    operation: pairs of an expert stay in order.
    """
    num_pairs = ids.numel()
    most = min(num_pairs, num_pairs // tile + num_experts)  # an expert's last tile may be partly empty
    pairs = torch.empty(most * tile, dtype=torch.int32, device=ids.device)
    experts = torch.empty(most + 1, dtype=torch.int32, device=ids.device)
    few = num_pairs <= 128
    _sort_kernel[(num_experts,)](
        ids.contiguous(), pairs, experts, num_pairs, first, most, NUM=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1), TILE=tile, BLOCK=128 if few else 1024, num_warps=4 if few else 8,
    )  # fmt: skip
    return pairs, experts, most


@triton.jit
def _largest(choice, expert):
    """Return the largest entry of a tile and the first expert that has it."""
    best = tl.max(tl.max(choice, 1), 0)
    return best, tl.min(tl.min(tl.where(choice == best, expert, 1 << 30), 1), 0)


@triton.jit
def _in_best_groups(
    choice, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):
    """Return `choice` `[groups, experts]` with -inf outside the best groups."""
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    left = choice
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(left, 1)
        total += best
        where = tl.min(tl.where(left == best[:, None], member[None, :], BLOCK_S), 1)
        left = tl.where(member[None, :] == where[:, None], float("-inf"), left)
    inside = tl.zeros((BLOCK_G,), dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        where = tl.min(tl.where(total == tl.max(total, 0), group, BLOCK_G), 0)
        inside = tl.where(group == where, 1, inside)
        total = tl.where(group == where, float("-inf"), total)
    return tl.where(inside[:, None] > 0, choice, float("-inf"))


@triton.jit
def _route_kernel(
    logits, correction, bias, weights, ids, stride, scale, epsilon, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    expert, inside = group * SIZE + member, (group < GROUPS) & (member < SIZE)
    scores = tl.load(logits + token * stride + expert, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        scores += tl.load(bias + expert, mask=inside, other=0.0)
    if SCORES == 0:
        scores = tl.where(inside, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    elif SCORES == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, mask=inside, other=0.0)
    choice = tl.where(inside & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, BLOCK_G, BLOCK_S, TOP_GROUPS, GROUP_BEST)

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), dtype=tl.float32)
    found = tl.zeros((BLOCK_K,), dtype=tl.int64)
    for j in tl.static_range(TOP_K):
        _, which = _largest(choice, expert)
        score = tl.sum(tl.sum(tl.where(expert == which, scores, 0.0), 1), 0)
        chosen, found = tl.where(place == j, score, chosen), tl.where(place == j, which, found)
        choice = tl.where(expert == which, float("-inf"), choice)
    there = place < TOP_K
    if WEIGHTS == 1:
        chosen /= tl.sum(tl.where(there, chosen, 0.0), 0) + epsilon
    elif WEIGHTS == 2:
        chosen = tl.where(there, chosen, float("-inf"))
        chosen = tl.exp(chosen - tl.max(chosen, 0))
        chosen /= tl.sum(chosen, 0)
    elif WEIGHTS == 3:
        chosen = 1.0 / (1.0 + tl.exp(-chosen))
    tl.store(weights + token * TOP_K + place, chosen * scale, mask=there)
    tl.store(ids + token * TOP_K + place, found, mask=there)


@triton.jit
def _experts_of(ids, pair, num_pairs, first, NUM: tl.constexpr):
    """Return the experts of some pairs in the stack, NUM for those of other ranks and where there is no pair."""
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first
    return tl.where((pair < num_pairs) & (expert >= 0) & (expert < NUM), expert, NUM)


# the numbers of pairs and tiles change from step to step
@triton.jit(do_not_specialize=["num_pairs", "most"])
def _sort_kernel(
    ids, pairs, experts, num_pairs, first, most, NUM: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    own, bins, lanes = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        counts += tl.histogram(_experts_of(ids, start + lanes, num_pairs, first, NUM), BINS)
    tiles = tl.where(bins < NUM, (counts + TILE - 1) // TILE, 0)
    first_tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    num_tiles, count = tl.sum(tl.where(bins == own, tiles, 0), 0), tl.sum(tl.where(bins == own, counts, 0), 0)
    if own == 0:
        tl.store(experts + most, tl.sum(tiles, 0))
    if count > 0:
        begin, before = pairs + first_tile * TILE, 0
        for start in range(0, num_pairs, BLOCK):
            here = _experts_of(ids, start + lanes, num_pairs, first, NUM) == own
            rank = before + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(begin + rank, start + lanes, mask=here)
            tl.store(experts + first_tile + rank // TILE, own, mask=here & (rank % TILE == 0))
            before += tl.sum(here.to(tl.int32), 0)
        rest = count + tl.arange(0, TILE)
        tl.store(begin + rest, num_pairs, mask=rest < num_tiles * TILE)
