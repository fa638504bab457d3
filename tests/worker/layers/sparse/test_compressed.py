"""Compressed keys: the means of windows whatever the steps, which of them the index keeps, and their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cache.allocation import allocate
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.sparse.compressed import CompressedKeys, Queries, WindowKeys, attend
from quire.worker.layers.state import StateSteps
from quire.worker.layers.states.compression import compress
from quire.worker.models.deepseek_v4 import DeepseekV4
from quire.worker.models.registry import parse_model_spec
from quire.worker.spec.cache import Compressed, CompressedSizes, Latent, plan_cache

RATE = 4


def _metadata(table: list[int], counts: list[int], lengths: list[int], slots: torch.Tensor) -> AttentionMetadata:
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    blocks = torch.tensor([table] * len(counts), dtype=torch.int32)
    return AttentionMetadata(
        CpuPagedAttention(), slots, starts, torch.tensor(lengths, dtype=torch.int32), blocks, max(counts), max(lengths)
    )


def _mean(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (gate.softmax(0) * kv).sum(0)


@pytest.mark.parametrize("series", [1, 2])
@pytest.mark.parametrize("steps", [[19], [1] * 19, [3, 1, 6, 2, 7], [4, 4, 8, 3]])
def test_means_of_windows_do_not_depend_on_the_steps(series, steps):
    torch.manual_seed(0)
    kv, gate = torch.randn(2, sum(steps), series, 5)
    gate = gate * 30  # so that exponents of single logits are infinite in float32
    pages, outputs, done = torch.zeros(2, series, 3, 5), [], 0
    for count in steps:
        at = slice(done, done + count)
        done += count
        meta = _metadata([1, 1], [count], [done], torch.zeros(count, dtype=torch.int64))
        StateSteps().build(meta)
        outputs.append(compress(kv[at], gate[at], torch.arange(at.start, done), RATE, pages, meta.extra))
    means = torch.cat(outputs)
    for last in range(RATE - 1, sum(steps), RATE):
        window = slice(last - RATE + 1, last + 1)
        values, logits = kv[window, -1], gate[window, -1]
        if series == 2 and last >= RATE:
            before = slice(last - 2 * RATE + 1, last - RATE + 1)
            values, logits = torch.cat([kv[before, 0], values]), torch.cat([gate[before, 0], logits])
        torch.testing.assert_close(means[last], _mean(values, logits), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [20, 1])
def test_keys_that_the_index_skips_do_not_matter_and_kept_ones_do(count):
    torch.manual_seed(0)
    sizes = CompressedSizes(8, 4, 1, 8, RATE, True, top=2, index_heads=3, index_dim=6)
    window = WindowKeys(2, 8, 4, 0, 5, torch.nn.Parameter(torch.zeros(2)))
    keys = CompressedKeys(8 + 6, RATE, 1)
    plan = plan_cache([layer.cache_spec(4) for layer in (window, keys)], block_size=8)
    allocate([window, keys], plan, 8, 8, KVStorage(torch.float32), CpuPlatform())
    length = 20
    slots = torch.tensor([[1, 2, 3][p // 8] * 8 + p % 8 for p in range(length)])
    window.write(torch.randn(length, 8), _metadata([1, 2, 3], [length], [length], slots))
    ends = torch.arange(RATE - 1, length, RATE)
    stored = torch.randn(len(ends), 14)
    places = torch.tensor([[4, 5, 6][p // 8] * 8 + p % 8 for p in ends])
    keys.write(stored, places, 8)
    queries = Queries(torch.randn(count, 2, 8), torch.randn(count, 3, 6), torch.rand(count, 3))
    positions = torch.arange(length - count, length)
    metas = [_metadata(table, [count], [length], slots[-count:]) for table in ([1, 2, 3], [4, 5, 6])]

    def result() -> torch.Tensor:
        return attend(queries, positions, window, keys, sizes, *metas)[-1]

    scores = torch.einsum("hi,ni->hn", queries.index_q[-1], stored[:, 8:]).relu() * queries.index_weights[-1][:, None]
    kept = set(scores.sum(0).topk(2).indices.tolist())
    expected = result()
    for number in range(len(ends)):
        changed = stored.clone()
        changed[number, :8] = 7.0
        keys.write(changed, places, 8)
        assert torch.equal(result(), expected) is (number not in kept)
    keys.write(stored, places, 8)
    assert torch.equal(result(), expected)


def test_layers_with_compressed_keys_share_pages():
    window, sparse, heavy = Latent(512, 64, 2, window=128), Compressed(640, 4, 2), Compressed(512, 128, 2)
    plan = plan_cache([window] * 8 + [sparse] * 6 + [heavy] * 8, block_size=16)
    assert plan.layer_page_bytes(16) == window.page_bytes(16) == 16 * 512 * 2
    assert [group.kind for group in plan.groups] == ["window"] * 4 + ["full"] * 2 and plan.layers_per_group == 2
    assert [plan.per_page(g) for g in range(6)] == [1, 1, 1, 1, 3, 16]
    assert plan.layers[4] == tuple(range(8, 14)) and plan.num_slabs([8, 9, 10, 11]) == 2


def test_published_settings_and_names():
    raw = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4}
    raw |= {"compress_ratios": [0, 128, 4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 64}
    raw["rope_scaling"] = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    spec = parse_model_spec(raw)
    assert [layer.compressed.rate for layer in spec.layers] == [0, 128, 4, 128]
    assert [layer.mlp for layer in spec.layers] == ["hash_moe", "moe", "moe", "moe"]
    assert [layer.rope for layer in spec.layers] == ["main", "compress", "compress", "compress"]
    assert spec.ropes["main"].scaling is None and spec.ropes["compress"].scaling["attention_factor"] == 1.0
    model = object.__new__(DeepseekV4)
    spec = parse_model_spec(raw | {"num_nextn_predict_layers": 1})
    object.__setattr__(model, "spec", replace(spec, has_head=True))
    names = model.tensor_names(["embed.weight"])
    for ours, published in {
        "lm_head.weight": "head.weight",
        "model.norm.weight": "norm.weight",
        "model.hc_head_fn": "hc_head_fn",
        "model.layers.3.self_attn.indexer.q_b_proj.weight": "layers.3.attn.indexer.wq_b.weight",
        "model.layers.3.mlp.experts.5.down_proj.weight": "layers.3.ffn.experts.5.w2.weight",
        "model.layers.3.mlp.shared_expert.gate_proj.weight": "layers.3.ffn.shared_experts.w1.weight",
        "mtp.0.fc.weight": "mtp.0.e_proj.weight",
        "mtp.0.hc_head_fn": "mtp.0.hc_head_fn",
        "mtp.0.layer.self_attn.q_b_proj.weight": "mtp.0.attn.wq_b.weight",
    }.items():
        assert names.in_file(ours) == published
