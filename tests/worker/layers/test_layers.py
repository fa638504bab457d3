"""Layers against independent formulas. test_models.py compares whole models with transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.worker.layers import linear
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import split_kv_heads
from quire.worker.layers.norm import RMSNorm, add_rms_norm, rms_norm
from quire.worker.layers.rotary import RotaryEmbedding, apply_rotary
from quire.worker.parallel import Group

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn beta": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64,
        "beta_slow": 4,
        "truncate": False,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn attention": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500000.0), (64, 10000.0)])
def test_rotary_table_equals_transformers(scaling, head_dim, theta):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    )
    positions = torch.tensor([0, 1, 17, 4095, 4096, 39999])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rows = RotaryEmbedding(head_dim, 40000, theta, scaling).cos_sin_cache[positions]
    error = (rows - torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), -1)).abs().amax(-1)
    # a frequency is exact to one float32 rounding, an angle to position times that
    assert (error <= 2e-6 + 2e-7 * positions).all(), error


def test_rotary_preserves_length_and_depends_on_distance_only():
    table = RotaryEmbedding(32, 200, 10000.0, None).cos_sin_cache
    q, k = torch.randn(1, 2, 32), torch.randn(1, 2, 32)

    def score(m: int, n: int) -> torch.Tensor:
        return (apply_rotary(q, table[[m]]) * apply_rotary(k, table[[n]])).sum(-1)

    torch.testing.assert_close(score(150, 120), score(40, 10), atol=1e-4, rtol=0)
    torch.testing.assert_close(apply_rotary(q, table[[99]]).norm(), q.norm())
    assert torch.equal(apply_rotary(q, table[[0]]), q)


def test_rotary_of_bfloat16_is_computed_in_float32():
    table, x = RotaryEmbedding(64, 100, 10000.0, None).cos_sin_cache, torch.randn(5, 3, 64).bfloat16()
    rows = table[50:55]
    assert torch.equal(apply_rotary(x, rows), apply_rotary(x.float(), rows).bfloat16())


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5), st.sampled_from([8, 96]), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(1e-3, 1e3)
)
def test_norms(tokens, size, dtype, magnitude):
    x, residual, weight = (
        (torch.randn(tokens, size) * magnitude).to(dtype),
        torch.randn(tokens, size).to(dtype),
        torch.randn(size).to(dtype),
    )
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact, rtol=tolerance, atol=tolerance)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(normed, rms_norm(x + residual, weight, 1e-6))
    norm = RMSNorm(size, 1e-6).to(dtype)
    norm.weight.data.copy_(weight)
    assert torch.equal(norm(x), rms_norm(x, weight, 1e-6)) and torch.equal(norm.add(x, residual)[0], normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 6, 15, 16, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_where_the_cpu_multiplies_no_halves(monkeypatch, tokens, dtype, has_bias):
    monkeypatch.setattr(linear, "multiplies", lambda dtype: False)
    monkeypatch.setattr(linear, "_PIECE", 1000)  # 20 rows of the weight, and a remainder
    monkeypatch.setattr(linear, "_CACHED_PIECE", 350)
    torch.manual_seed(tokens)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((tokens, 50), (90, 50), (90,)))
    want = F.linear(x.double(), weight.double(), bias.double() if has_bias else None).to(dtype)
    torch.testing.assert_close(linear.product(x, weight, bias if has_bias else None), want)


@pytest.mark.parametrize("has_instructions", [False, True])
def test_where_bf16_is_multiplied_as_it_is(monkeypatch, has_instructions):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    assert linear.multiplies.__wrapped__(torch.bfloat16) == has_instructions


def test_silu_and_mul():
    gate, up = torch.randn(3, 10), torch.randn(3, 10)
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), F.silu(gate) * up)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (8, 4, [(2, 0), (2, 2), (2, 4), (2, 6)]),
        (2, 4, [(1, 0), (1, 0), (1, 1), (1, 1)]),
        (1, 3, [(1, 0), (1, 0), (1, 0)]),
        (4, 4, [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_kv_heads_of_each_rank(heads, size, expected):
    groups = [Group() for _ in range(size)]
    for rank, group in enumerate(groups):
        group.rank, group.size = rank, size
    assert [split_kv_heads(heads, group) for group in groups] == expected


def test_attention_stores_then_attends():
    calls = []

    class Backend:
        def write_kv(self, k, v, k_cache, v_cache, slot_mapping):
            calls.append(("write", k.shape, v.shape, k_cache, v_cache, slot_mapping))

        def forward(self, q, k_cache, v_cache, meta, scale, sliding_window, soft_cap, sinks):
            calls.append(("forward", q.shape, k_cache, v_cache, scale, sliding_window, soft_cap))
            return q

    class Meta:
        backend, slot_mapping = Backend(), object()

    layer = Attention(4, 2, 16, layer_index=3, sliding_window=7, soft_cap=30.0)
    layer.k_cache, layer.v_cache = object(), object()
    qkv = torch.randn(5, 128)
    flat = layer(*qkv.split([64, 32, 32], -1), Meta)  # views of a fused output, heads flat
    assert torch.equal(flat, qkv[:, :64])
    assert torch.equal(layer(*(x.unflatten(-1, (-1, 16)) for x in qkv.split([64, 32, 32], -1)), Meta), flat)
    write, forward = calls[:2]
    assert write[0] == "write" and write[1] == write[2] == (5, 2, 16)
    assert write[3] is layer.k_cache and write[4] is layer.v_cache and write[5] is Meta.slot_mapping
    assert (
        forward[:2] == ("forward", (5, 4, 16))
        and forward[2] is layer.k_cache
        and forward[3] is layer.v_cache
        and forward[4:] == (0.25, 7, 30.0)
    )
