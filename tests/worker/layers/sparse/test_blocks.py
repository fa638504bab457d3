"""Attention to chosen blocks of keys: whatever the steps and the cache's type, and what is not read."""

from __future__ import annotations

import pytest
import torch

from quire.worker.attention.scaled import ScaledCache
from quire.worker.layers.attention import Attention
from quire.worker.layers.sparse import chosen
from quire.worker.layers.sparse.blocks import attend_to_blocks, choose_blocks, choose_whole_blocks
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, Piece, choosing_step
from quire.worker.models.registry import parse_model_spec
from quire.worker.spec.cache import IndexSizes
from quire.worker.spec.index import without_indexes
from tests.worker.layers.sparse.test_chosen import cache, metadata

HEADS, KV_HEADS, DIM, NUMBER = 4, 2, 8, 50
SIZES = IndexSizes(top=12, heads=KV_HEADS, dim=DIM, block=3, local=1)


class Case:
    """One request: its index, its queries, keys and values, and the result of dense attention with a mask."""

    index_heads = KV_HEADS

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.index_q = torch.randn(NUMBER, self.index_heads, DIM, generator=random)
        self.index_k = torch.randn(NUMBER, DIM, generator=random)
        self.q = torch.randn(NUMBER, HEADS, DIM, generator=random)
        self.k, self.v = torch.randn(2, NUMBER, KV_HEADS, DIM, generator=random)
        self.layer = Attention(HEADS, KV_HEADS, DIM, 0)
        self.layer.k_cache, self.layer.v_cache = (cache(DIM).repeat(1, 1, KV_HEADS, 1) for _ in range(2))
        self.index = IndexKeys(DIM, DIM // 2, 1)
        self.index.k_cache = cache(DIM)

    def visible(self) -> torch.Tensor:
        """Which keys each query of each KV head sees, `[T, G, T]`."""
        scores = torch.einsum("qgd,kd->qgk", self.index_q, self.index_k)
        causal = torch.ones(NUMBER, NUMBER).tril().bool()[:, None]
        scores = scores.masked_fill(~causal, -torch.inf)
        blocks = torch.arange(NUMBER) // SIZES.block
        best = torch.stack([scores[..., blocks == i].amax(-1) for i in range(int(blocks[-1]) + 1)], -1)
        best[torch.arange(NUMBER), :, blocks] = torch.inf
        kept = torch.zeros_like(best).scatter_(-1, best.topk(SIZES.top // SIZES.block, -1).indices, 1.0).bool()
        return kept[..., blocks] & causal

    def choose(self, piece: Piece, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return choose_blocks(piece, q, keys, SIZES)

    def expected(self) -> torch.Tensor:
        q = self.q.unflatten(1, (KV_HEADS, -1))
        scores = torch.einsum("qghd,kgd->qghk", q, self.k) * self.layer.scale
        weights = scores.masked_fill(~self.visible()[:, :, None], -torch.inf).softmax(-1)
        return torch.einsum("qghk,kgd->qghd", weights, self.v).flatten(1)

    def step(self, first: int, count: int) -> torch.Tensor:
        rows, meta = slice(first, first + count), metadata([count], [first + count])
        meta.backend.write_kv(self.k[rows], self.v[rows], self.layer.k_cache, self.layer.v_cache, meta.slot_mapping)
        self.index.write(self.index_k[rows], meta)
        step, q = choosing_step((meta,), SIZES.top, 1), self.q[rows]
        if step is None:
            return self.layer.attend(q, meta)
        out = torch.empty(count, HEADS * DIM)
        if (others := step.others(meta, 0)) is not None:
            out[others[0]] = self.layer.attend(q[others[0]], others[1])
        for piece in step.pieces:
            keys = self.index.rows(meta, piece.requests, piece.longest)
            piece.keys = self.choose(piece, self.index_q[rows][piece.tokens], keys)
            tokens = piece.tokens.flatten()
            some = torch.arange(len(tokens))
            out[tokens] = attend_to_blocks(self.layer, q[tokens], some, piece, meta, SIZES.block).flatten(1)
        return out


class MeanCase(Case):
    """Whole blocks are chosen by the means of their keys, for all heads, and the tokens after them."""

    index_heads = 24

    def visible(self) -> torch.Tensor:
        kept = torch.zeros(NUMBER, NUMBER).bool()
        for position in range(NUMBER):
            whole = (position + 1) // SIZES.block
            means = self.index_k[: whole * SIZES.block].unflatten(0, (whole, SIZES.block)).mean(1)
            scores = (self.index_q[position] @ means.T).relu().sum(0)
            for block in scores.topk(min(whole, SIZES.top // SIZES.block)).indices.tolist():
                kept[position, block * SIZES.block : (block + 1) * SIZES.block] = True
            kept[position, whole * SIZES.block : position + 1] = True
        return kept[:, None].expand(-1, KV_HEADS, -1)

    def choose(self, piece: Piece, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        whole = keys.shape[1] // SIZES.block
        means = keys[:, : whole * SIZES.block].unflatten(1, (whole, -1)).mean(2)
        return choose_whole_blocks(piece, q, means, SIZES, KV_HEADS)


@pytest.mark.parametrize("steps", [[50], [1] * 50, [10, 1, 1, 30, 8], [12, 1, 37]])
@pytest.mark.parametrize("bound", [1 << 24, 200])
@pytest.mark.parametrize("make", [Case, MeanCase])
def test_results_do_not_depend_on_the_steps(make, steps, bound, monkeypatch):
    monkeypatch.setitem(chosen._SCORES, "cpu", bound)
    case, done, got = make(), 0, []
    for count in steps:
        got.append(case.step(done, count))
        done += count
    torch.testing.assert_close(torch.cat(got), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [Case, MeanCase])
def test_skipped_keys_do_not_matter_and_chosen_ones_do(make):
    case = make()
    exact, visible = case.step(0, NUMBER)[-1], case.visible()[-1]
    for position in range(NUMBER):
        changed = make()
        changed.v[position] += 1
        heads = changed.step(0, NUMBER)[-1].view(KV_HEADS, -1) != exact.view(KV_HEADS, -1)
        assert heads.any(1).tolist() == visible[:, position].tolist()


def test_caches_in_8_bits():
    case = Case()
    exact = case.step(0, NUMBER)
    for name in ("k_cache", "v_cache"):
        values = torch.zeros_like(getattr(case.layer, name)).to(torch.int8)
        setattr(case.layer, name, ScaledCache(values, torch.zeros(values.shape[:3])))
    meta = metadata([NUMBER], [NUMBER])
    for entries, target in ((case.k, case.layer.k_cache), (case.v, case.layer.v_cache)):
        target.write(meta.slot_mapping // 8, meta.slot_mapping % 8, entries)
    (piece,) = ChoosingStep(meta, SIZES.top, 1).pieces
    piece.keys = choose_blocks(piece, case.index_q[piece.tokens], case.index.rows(meta, piece.requests, NUMBER), SIZES)
    tokens = piece.tokens.flatten()
    some = torch.arange(len(tokens))
    got = attend_to_blocks(case.layer, case.q[tokens], some, piece, meta, SIZES.block).flatten(1)
    torch.testing.assert_close(got, exact[tokens], atol=0.05, rtol=0.05)


M3 = {"architectures": ["MiniMaxM3VLForCausalLM"], "num_hidden_layers": 2}
KINDS = {"layer_types": ["full_attention", "minimax_m3_sparse"]}


def test_layers_that_choose():
    spec = parse_model_spec(M3 | KINDS)
    assert [layer.mixer for layer in spec.layers] == ["attention", "block_attention"]
    assert (spec.layers[1].index.top, spec.layers[1].index.block, spec.max_model_len) == (2048, 128, 524288)
    assert [layer.mixer for layer in without_indexes(spec, 2048).layers] == ["attention", "attention"]
    nested = {"sparse_attention_freq": [0, 1], "sparse_block_size": 64, "sparse_topk_blocks": 8}
    assert parse_model_spec(M3 | {"sparse_attention_config": nested}).layers[1].index.top == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_block_size": 0}, "index_block_size must be an integer of at least 1, not 0"),
        ({"index_n_heads": 2}, "index_n_heads 2 must be num_key_value_heads 4"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec(M3 | KINDS | changes)


QWEN4 = {"architectures": ["Qwen4ExpForCausalLM"], "num_hidden_layers": 4, "eos_token_id": [2, 1]}
QWEN4 |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "ple_layer_ids": [2]}
QSA = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048}
QSA |= {"indexer_compress_ratio": 16}


def test_layers_of_qwen4():
    spec = parse_model_spec(QWEN4 | QSA | {"output_gate_type": "sigmoid"})
    assert [layer.mixer for layer in spec.layers] == ["delta"] * 3 + ["block_attention"]
    index, ngrams = spec.layers[3].index, spec.layers[1].ngrams
    assert (index.top, index.block, index.width, index.means) == (2048, 16, 256, True)
    assert [layer.ngrams is None for layer in spec.layers] == [True, False, True, True]
    assert (len(ngrams.rows), ngrams.rows[0], ngrams.total % 128, ngrams.eos) == (16, 20000003, 0, 2)
    assert spec.layers[1].state.shapes(2)[2:] == ((9, 4 * 2048), (2,)) and spec.layers[0].state.gate == "sigmoid"
    (unchosen,) = {layer.mixer for layer in without_indexes(spec, 2048).layers} - {"delta"}
    assert unchosen == "attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_budget": None}, "indexer_budget must be a positive integer, not None"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1, not 2"),
        ({"indexer_budget": 40}, "indexer_budget 40 is not a multiple of indexer_compress_ratio 16"),
        ({"indexer_head_dim": 64}, "indexer_head_dim 64 must be at least 256"),
        ({"output_gate_type": "gelu"}, "output_gate_type must be sigmoid or silu, not 'gelu'"),
        ({"ple_layer_ids": [4]}, "layer 4 has attention"),
        ({"ple_embed_dim": 40}, "ple_embed_dim 40 is not a multiple of 16"),
        ({"eos_token_id": None}, "eos_token_id must be given with ple_layer_ids"),
    ],
)
def test_settings_of_qwen4_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec(QWEN4 | QSA | changes)
