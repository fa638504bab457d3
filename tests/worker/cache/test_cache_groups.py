"""Groups of layers that share block tables: how they are formed, where their memory is, and what windows save."""

from __future__ import annotations

import pytest
import torch

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.worker import memory
from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cache.allocation import allocate
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.attention import Attention
from quire.worker.limits import resolve_limits
from quire.worker.messages import CacheGroup, longest_request, most_blocks
from quire.worker.models.registry import read_model_spec
from quire.worker.spec.cache import Full, Latent, State, Window, add_heads, plan_cache
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import FAMILIES, build_family

FULL, WINDOW, STATE = Full(2, 16, 16, 2), Window(2, 16, 16, 2, 24), State(((4, 16, 16), (3, 64)))


def test_equal_layers_are_one_group():
    plan = plan_cache([FULL] * 5)
    assert plan.groups == (CacheGroup("full"),) and plan.layers == ((0, 1, 2, 3, 4),)
    assert plan.page_bytes(16) == 5 * 16 * 2 * (16 + 16) * 2


@pytest.mark.parametrize(
    ("num_full", "num_window", "size", "num_groups"),
    [(1, 5, 1, 6), (14, 14, 14, 2), (21, 7, 7, 4), (4, 22, 4, 7), (5, 25, 5, 6), (3, 4, 1, 7)],
)
def test_groups_are_evened_out(num_full, num_window, size, num_groups):
    specs = [WINDOW] * num_window + [FULL] * num_full
    plan = plan_cache(specs)
    assert plan.layers_per_group == size and len(plan.groups) == num_groups
    assert sorted(layer for layers in plan.layers for layer in layers) == list(range(len(specs)))
    for group, layers in zip(plan.groups, plan.layers):
        assert len(layers) <= size and {specs[layer].group for layer in layers} == {group}


def test_a_page_is_as_large_as_the_largest_kind_needs():
    latent = Latent(576, 64, 2)
    plan = plan_cache([latent, FULL])
    largest = 16 * 576 * 2
    assert largest <= plan.layer_page_bytes(16) < largest + 576 * 2 and plan.layer_page_bytes(16) % (576 * 2) == 0


def test_states_are_one_group_with_pages_of_its_own():
    plan = plan_cache([FULL, None, None, FULL], [None, STATE, State(((2, 2),)), STATE])
    assert [group.kind for group in plan.groups] == ["full", "state"] and plan.layers == ((0, 3), (1, 2, 3))
    one = (4 * 16 * 16 + 3 * 64) * 4
    assert plan.page_bytes(16) == plan_cache([FULL, FULL]).page_bytes(16) and plan.state_bytes() == 2 * one + 16
    assert plan.state_bytes([0, 1]) == one and plan.num_slabs([1, 2]) == 0
    pure = plan_cache([None], [STATE])
    assert pure.page_bytes(16) == 0 and [group.kind for group in pure.groups] == ["state"]


def test_a_stage_of_a_pipeline_needs_memory_for_its_own_layers():
    plan = plan_cache([FULL] * 4 + [WINDOW] * 4)
    assert plan.layers_per_group == 4
    assert plan.num_slabs(range(2)) == 2 and plan.num_slabs(range(3, 5)) == 1 and plan.num_slabs(range(8)) == 4


def test_blocks_that_a_request_holds_at_once():
    window = CacheGroup("window", 24)
    assert window.first_block(24, 8) == 0 and window.first_block(31, 8) == 1  # a token at 31 sees 8 .. 31
    assert window.most_blocks(1000, 8, 16) == 6 and window.most_blocks(10, 8, 16) == 2
    chunk = CacheGroup("chunk", 24)
    assert chunk.first_block(23, 8) == 0 and chunk.first_block(24, 8) == chunk.first_block(47, 8) == 3
    assert chunk.most_blocks(1000, 8, 16) == 6
    assert CacheGroup("full").most_blocks(1000, 8, 16) == 125 and CacheGroup("state").most_blocks(1000, 8, 16) == 0
    groups = [CacheGroup("full"), window]
    assert longest_request(groups, 100, 8, 16, 10**6) == (100 - 6) * 8
    assert most_blocks(groups, (100 - 6) * 8, 8, 16) == 100 and longest_request([window], 6, 8, 16, 10**6) == 10**6


def test_layers_of_unequal_shapes_share_pages():
    """Two kinds of layers in the pages of one pool: each reads its own keys and values after both have written."""
    torch.manual_seed(0)
    layers = [Attention(4, 2, 16, 0), Attention(2, 1, 64, 1, sliding_window=24)]
    plan = plan_cache([layer.cache_spec(4) for layer in layers])
    allocate(layers, plan, 6, 4, KVStorage(torch.float32), CpuPlatform())
    assert [layer.cache_group for layer in layers] == [0, 1]
    assert layers[0].k_cache.untyped_storage().data_ptr() == layers[1].k_cache.untyped_storage().data_ptr()
    starts, lengths = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    results = []
    for layer, blocks in zip(layers, ([5, 2], [1, 3])):
        slots = torch.tensor([blocks[p // 4] * 4 + p % 4 for p in range(6)])
        meta = AttentionMetadata(
            CpuPagedAttention(), slots, starts, lengths, torch.tensor([blocks], dtype=torch.int32), 6, 6
        )
        q = torch.randn(6, layer.num_heads, layer.head_dim)
        k, v = (torch.randn(6, layer.num_kv_heads, layer.head_dim) for _ in range(2))
        meta.backend.write_kv(k, v, layer.k_cache, layer.v_cache, slots)
        results.append((layer, meta, q, k, v))
    for layer, meta, q, k, v in results:  # after both have written
        meta.backend.build(meta)
        group = layer.num_heads // layer.num_kv_heads
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(group, 0),
            v.transpose(0, 1).repeat_interleave(group, 0),
            is_causal=True,
        )
        torch.testing.assert_close(layer.attend(q, meta), want.transpose(0, 1).flatten(1))


def limits_of(folder: str, **settings) -> tuple[Config, memory.ModelSpec, memory.Limits]:
    config, spec = Config.from_flat(model=folder, device="cpu", **settings), read_model_spec(folder)
    return config, spec, resolve_limits(config, spec, CpuPlatform())


def test_a_long_context_with_a_window_takes_little_in_the_plan(checkpoint):
    """32k tokens with a window of 4k: an eighth, the chunk that is being computed aside."""
    context = {"max_position_embeddings": 32768}
    settings = dict(max_num_batched_tokens=2048, max_num_seqs=1, max_model_len="32768", block_size=16)
    windowed = limits_of(checkpoint("mistral", sliding_window=4096, **context), **settings)
    full = limits_of(checkpoint("mistral", sliding_window=None, **context), **settings)
    sizes = {}
    for name, (config, spec, limits) in (("windowed", windowed), ("full", full)):
        groups = memory.cache_plan(config, spec, limits).groups
        blocks = most_blocks(groups, 32768, 16, 2048)
        sizes[name] = blocks * memory.bytes_per_block(config, spec, limits)
    assert sizes["windowed"] / sizes["full"] == pytest.approx((4096 + 2048 + 16) / 32768, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [("mistral", 0.25), ("qwen2-window", 0.55), ("llama2", 1.0), ("gemma3", 0.6), ("gemma4", 0.6), ("llama4", 0.6)],
)
def test_windows_give_blocks_back_while_a_request_runs(checkpoint, tmp_path, name, expected):
    """The most memory that a request of 640 tokens holds, as a part of what it would hold without windows of 24 tokens
    and chunks of 32.
    """
    engine = InProcessEngine(
        build_family(name, tmp_path) if name in FAMILIES else checkpoint(name),
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        max_model_len="740",
    )
    kv, groups = engine.scheduler.kv, engine.ready.groups
    assert engine.ready.groups == list(groups)
    most = 0
    allocate_blocks = kv.allocate

    def watch(request, num_tokens):
        nonlocal most
        added = allocate_blocks(request, num_tokens)
        most = max(most, kv.pool.num_usable - kv.pool.num_free)
        return added

    kv.allocate = watch
    prompt = [(7 * i) % 120 + 4 for i in range(600)]
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.close()
    assert result.error is None and len(result.token_ids) == 40
    without_windows = len(groups) * -(-640 // 4)
    assert most <= expected * without_windows
    assert most <= most_blocks(groups, 640, 4, 64)


@pytest.mark.parametrize("name", ["mistral", "qwen2-window"])
def test_a_prefix_hit_over_windows_gives_the_same_tokens(checkpoint, name):
    engine = InProcessEngine(
        checkpoint(name), block_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len="740"
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    stem = [(11 * i) % 480 + 4 for i in range(203)]
    prompts = [stem, [*stem[:150], 9, 8, 7], stem[:120]]
    first = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    again = engine.generate(prompts, sampling)
    engine.close()
    assert [result.token_ids for result in again] == [result.token_ids for result in first]
    assert all(result.num_cached_tokens > 0 for result in again)


def test_heads_with_a_window_form_groups_before_that_of_states():
    """Head i computes a token up to i steps later than the model: its window reaches further back."""
    plan = plan_cache([FULL, WINDOW, None, WINDOW, FULL], [None, None, STATE, None, None])
    with_heads = add_heads(plan, WINDOW, 3)
    assert [group.kind for group in with_heads.groups] == ["full", "window", "window", "window", "state"]
    assert with_heads.groups[2:4] == (CacheGroup("window", 26),) * 2 and with_heads.layers[2:4] == ((5, 6), (7,))
    assert with_heads.page_bytes(16) == plan.page_bytes(16)
    assert with_heads.num_slabs([0]) == 2 and plan.num_slabs([0]) == 1
    apart = add_heads(plan, FULL, 3)
    assert apart.groups == plan.groups and apart.page_bytes(16) == plan.page_bytes(16) + 3 * FULL.page_bytes(16)
