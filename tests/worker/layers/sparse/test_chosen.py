"""Attention to chosen keys: the choice and the result whatever the steps, what is not read, and the pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.scaled import FP8, ScaledLatents
from quire.worker.layers.mla import LatentAttention
from quire.worker.layers.sparse import chosen
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, attend_to_chosen, choose, choosing_step
from quire.worker.models.registry import parse_model_spec
from quire.worker.spec.cache import Compressed, LatentSizes, plan_cache
from quire.worker.spec.index import unread_indexes
from quire.worker.spec.model import cache_specs, kv_bytes_per_token
from quire.worker.transformer.decoder import stage_layers
from tests.helpers.worker.dense_attention import DenseAttention

SIZE, TOP, HEADS, DIM = 8, 12, 6, 16  # tokens of a block; keys per token; heads and size of the index
SIZES = LatentSizes(rank=16, nope_dim=8, rope_dim=4, v_dim=8)


def metadata(counts: list[int], lengths: list[int], blocks: int = 8) -> AttentionMetadata:
    """Requests with blocks of their own, in a scattered order, behind the null block."""
    order = torch.randperm(blocks * len(counts), generator=torch.Generator().manual_seed(3)) + 1
    table = order.view(len(counts), blocks).int()
    slots = [
        table[i, at // SIZE].long() * SIZE + at % SIZE
        for i, (count, length) in enumerate(zip(counts, lengths))
        for at in torch.arange(length - count, length)
    ]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    meta = AttentionMetadata(DenseAttention(), torch.stack(slots), starts, seq_lens, table, max(counts), max(lengths))
    meta.backend.build(meta)
    return meta


def cache(width: int, num_blocks: int = 40) -> torch.Tensor:
    """A cache full of what an earlier request, or other layers, left: not numbers."""
    return torch.full((num_blocks, SIZE, 1, width), float("nan"))


class Case:
    """One request of 50 tokens: its index, its queries and keys, and the result of dense attention with a mask."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.number, heads = 50, 3
        self.keys = torch.randn(self.number, DIM, generator=random)
        self.index_q = torch.randn(self.number, HEADS, DIM, generator=random)
        self.weights = torch.randn(self.number, HEADS, generator=random)
        self.latents = torch.randn(self.number, SIZES.width, generator=random)
        self.q_nope = torch.randn(self.number, heads, SIZES.nope_dim, generator=random)
        self.q_pe = torch.randn(self.number, heads, SIZES.rope_dim, generator=random)
        self.kv_b = torch.randn(heads * (SIZES.nope_dim + SIZES.v_dim), SIZES.rank, generator=random)
        self.layer = LatentAttention(heads, SIZES, 0, 0.3)
        self.layer.k_cache = cache(SIZES.width)
        self.layer.v_cache = self.layer.k_cache[..., : SIZES.rank]
        self.index = IndexKeys(DIM, SIZES.rope_dim, 1)  # in 8 bits, both parts of a key have a scale
        self.index.k_cache = cache(DIM)

    def visible(self) -> torch.Tensor:
        scores = (torch.einsum("qhd,kd->qhk", self.index_q, self.keys).relu() * self.weights[..., None]).sum(1)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        best = scores.topk(TOP, -1).indices
        return torch.zeros_like(scores).scatter_(-1, best, 1.0).bool() & (scores > -torch.inf)

    def expected(self) -> torch.Tensor:
        w_k, w_v = self.layer.matrices(self.kv_b)
        c, k_pe = self.latents.split([SIZES.rank, SIZES.rope_dim], -1)
        k, v = torch.einsum("tr,hnr->htn", c, w_k), torch.einsum("tr,hvr->htv", c, w_v)
        scores = torch.einsum("qhn,htn->hqt", self.q_nope, k) + torch.einsum("qhp,tp->hqt", self.q_pe, k_pe)
        scores = (scores * self.layer.scale).masked_fill(~self.visible(), -torch.inf)
        return torch.einsum("hqt,htv->qhv", scores.softmax(-1), v).flatten(1)

    def step(self, first: int, count: int) -> torch.Tensor:
        """Tokens `first` to `first + count` as one step."""
        rows, meta = slice(first, first + count), metadata([count], [first + count])
        self.index.write(self.keys[rows], meta)
        self.layer.write(self.latents[rows], meta)
        step = choosing_step((meta,), TOP, HEADS)
        for piece in step.pieces if step else ():
            tokens = piece.tokens
            keys = self.index.rows(meta, piece.requests, piece.longest)
            piece.keys = choose(piece, self.index_q[rows][tokens], self.weights[rows][tokens], keys, TOP)
        return self.layer.attend_latent(self.q_nope[rows], self.q_pe[rows], self.kv_b, meta, step)


@pytest.mark.parametrize("steps", [[50], [1] * 50, [10, 1, 1, 30, 8], [12, 1, 37]])
@pytest.mark.parametrize("bound", [1 << 24, 200])
def test_results_do_not_depend_on_the_steps(steps, bound, monkeypatch):
    """Nor on the number of pieces. The blocks hold anything behind the tokens."""
    monkeypatch.setitem(chosen._SCORES, "cpu", bound)
    monkeypatch.setitem(chosen.GATHERED_BYTES, "cpu", bound << 2)
    case, done, got = Case(), 0, []
    for count in steps:
        got.append(case.step(done, count))
        done += count
    torch.testing.assert_close(torch.cat(got), case.expected(), atol=1e-5, rtol=1e-5)


def test_skipped_keys_do_not_matter_and_chosen_ones_do():
    case = Case()
    exact, visible = case.step(0, 50)[-1], case.visible()[-1]
    assert visible.sum() == TOP
    for position in range(50):
        changed = Case()
        changed.latents[position] += 1
        same = torch.equal(changed.step(0, 50)[-1], exact)
        assert same is not bool(visible[position])


def test_requests_of_a_step_choose_among_their_own_keys():
    """Some decode, some have a part of a prompt, some have fewer keys than are chosen."""
    counts, lengths = [1, 5, 1, 20, 1, 3], [40, 14, 5, 32, 30, 12]
    meta = metadata(counts, lengths)
    step = ChoosingStep(meta, TOP, HEADS)
    positions = {
        int(token): (int(piece.requests[row]), int(at))
        for piece in step.pieces
        for row in range(len(piece.requests))
        for token, at in zip(piece.tokens[row], piece.positions[row])
    }
    starts = meta.query_start_loc.tolist()
    expected = {
        starts[i] + j: (i, length - count + j)
        for i, (count, length) in enumerate(zip(counts, lengths))
        for j in range(count)
        if length - count + j >= TOP
    }
    assert positions == expected
    others, part = step.others(meta, 0)
    assert sorted([*positions, *others.tolist()]) == list(range(sum(counts)))
    assert part.seq_lens.tolist() == [12, 5, 12]  # of the requests that have such tokens
    assert part.host == (part.query_start_loc.tolist(), part.seq_lens.tolist())
    assert part.query_start_loc.tolist() == [0, 3, 4, 7]


def test_steps_without_a_choice():
    assert choosing_step((metadata([5], [TOP]),), TOP, HEADS) is None


def test_sinks_take_a_part_of_the_weights():
    case = Case()
    case.step(0, 50)
    meta = metadata([1], [50])
    piece = ChoosingStep(meta, TOP, HEADS).pieces[0]
    piece.keys = torch.arange(TOP)[None, None]
    q = torch.randn(1, 3, SIZES.width)
    args = q, case.layer.k_cache, torch.tensor([0]), piece, meta, SIZES.rank, 0.3
    plain, none, all_of_it = (
        attend_to_chosen(*args, sinks) for sinks in (None, torch.full((3,), -1e9), torch.full((3,), 1e9))
    )
    torch.testing.assert_close(plain, none)
    assert all_of_it.abs().max() < 1e-6


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 0.03), (FP8, 0.12)])
def test_keys_in_8_bits(dtype, most):
    """Nearly the same keys are chosen."""
    case, meta = Case(), metadata([50], [50])
    pages = torch.zeros(40, SIZE, 1, DIM).to(dtype), torch.zeros(40, SIZE, 1, 2)
    case.index.k_cache = ScaledLatents(*pages, case.index.v_head_dim)
    case.index.write(case.keys, meta)
    (piece,) = ChoosingStep(meta, TOP, HEADS).pieces
    keys = case.index.rows(meta, piece.requests, 50)
    torch.testing.assert_close(keys[0], case.keys, atol=most, rtol=most)
    got = choose(piece, case.index_q[piece.tokens], case.weights[piece.tokens], keys, TOP)[0]
    wanted = [row.nonzero()[:, 0].tolist() for row in case.visible()[TOP:]]
    common = [len({*mine} & {*theirs}) for mine, theirs in zip(got.tolist(), wanted, strict=True)]
    assert sum(common) > 0.9 * TOP * len(common)


V32 = {"architectures": ["DeepseekV32ForCausalLM"]}
GLM = {"architectures": ["GlmMoeDsaForCausalLM"]}


def test_memory_and_groups():
    """The keys of four layers' indexes share a page with the size of one layer's latents."""
    spec = parse_model_spec(V32)
    specs = cache_specs(spec, 2)
    assert specs[61:] == [Compressed(128, 1, 2)] * 61
    assert kv_bytes_per_token(spec, 2) == 61 * 2 * (576 + 128)
    plan = plan_cache(specs)
    assert [len(members) for members in plan.layers] == [21, 21, 19, 61] and plan.sharing == (1, 1, 1, 4)
    assert kv_bytes_per_token(parse_model_spec(GLM | {"index_topk_freq": 4}), 2) == 2 * (78 * 576 + 21 * 128)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_pattern": "FSSFSSSF"}, [0, 3, 7]),
        ({"indexer_types": ["full", *["shared"] * 7]}, [0]),
    ],
)
def test_which_layers_choose(changes, own):
    layers = parse_model_spec(GLM | {"num_hidden_layers": 8} | changes).layers
    assert [i for i, layer in enumerate(layers) if layer.index.source is None] == own
    assert [layer.index.source for layer in layers if layer.index.source is not None] == [
        max(i for i in own if i < layer) for layer in range(8) if layer not in own
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk must be a positive integer, not 0"),
        ({"index_head_dim": 32}, "index_head_dim 32 must be at least qk_rope_head_dim 64"),
        ({"indexer_types": ["full", "shared"]}, "full or shared for each of 8 layers"),
        ({"index_topk_pattern": "SFFFFFFF"}, "full first"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec(GLM | {"num_hidden_layers": 8} | changes)


def test_a_stage_begins_with_a_layer_that_chooses():
    layers = parse_model_spec(GLM | {"num_hidden_layers": 8, "index_topk_pattern": "FSSFSSSF"}).layers
    assert [stage_layers(layers, rank, 2) for rank in range(2)] == [range(3), range(3, 8)]
    assert [stage_layers(layers, rank, 3) for rank in range(3)] == [range(3), range(3, 7), range(7, 8)]
    one = [replace(layer, index=replace(layer.index, source=0 if i else None)) for i, layer in enumerate(layers)]
    with pytest.raises(ValueError, match="several of which use one choice of keys"):
        stage_layers(one, 0, 2)


def test_tensors_of_indexes_that_are_not_there_are_ignored():
    import re

    spec = parse_model_spec(GLM | {"num_hidden_layers": 8, "index_topk_pattern": "FSSFSSSF"})
    (pattern,) = unread_indexes(spec)
    ignored = [i for i in range(9) if re.search(pattern, f"model.layers.{i}.self_attn.indexer.wk.weight")]
    assert ignored == [1, 2, 4, 5, 6, 8]
    assert not re.search(pattern, "model.layers.1.self_attn.q_b_proj.weight")
    assert unread_indexes(parse_model_spec({"architectures": ["DeepseekV4ForCausalLM"]})) == ()  # it has other indexes
