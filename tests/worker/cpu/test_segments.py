"""Compares the layers run in one native call, or in one call per segment, with the same layers called one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from quire.worker.attention.base import AttentionBackend
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cpu.attention import CpuNativeAttention
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.fixed_order_attention import CpuFixedAttention
from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.cpu.segments import Segments
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.transformer.attention import SelfAttention
from quire.worker.weights.loader import load_weights
from tests.helpers.models.families import build_family
from tests.helpers.worker.dense_attention import DenseAttention, PagedRunner

# Prompts, a step of more than 1024 tokens, odd sizes and single tokens.
STEPS = [{0: 3, 1: 290}, {0: 1, 1: 1}, {0: 40, 2: 1}, {0: 560, 1: 7, 2: 530}, {2: 1}]

_HYBRID = {"hidden_size": 128, "intermediate_size": 96}
_WIDE_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 144, "linear_num_value_heads": 2}
HYBRIDS = [
    ("qwen3_5", _HYBRID),
    ("qwen3_5", _HYBRID | _WIDE_HEADS),
    ("lfm2", _HYBRID),
    ("lfm2", _HYBRID | {"hidden_size": 576}),  # more channels than a convolution takes at a time
    ("lfm2_moe", _HYBRID),
]


def _model(folder: str, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None):
    spec = read_model_spec(folder)
    model = build_model(spec, dtype, torch.device("cpu"), 1024, quantization, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    return model


def _play(
    model,
    backend: AttentionBackend | None = None,
    wanted: Callable[[int], int] | None = None,
    steps: list[dict[int, int]] = STEPS,
    num_groups: int = 1,
    kv_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Hidden states of each step, for all tokens or for the last `wanted(count)` tokens of each request."""
    rng, runner = random.Random(0), PagedRunner(model, 3, 1024, backend, num_groups, kv_dtype)
    return [
        torch.cat(
            list(
                runner.step(
                    {
                        row: rng.choices(range(4, min(500, model.spec.vocab_size)), k=count)
                        for row, count in step.items()
                    },
                    wanted and {row: wanted(count) for row, count in step.items()},
                ).values()
            )
        )
        for step in steps
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [DenseAttention, CpuNativeAttention, CpuFixedAttention])
@pytest.mark.parametrize("fixed", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen3", None), ("llama-bias", None), ("qwen2-window", None), ("llama-tied", "int8"), ("qwen3", "int4")],
)
def test_same_bits_as_layer_by_layer(checkpoint, native_kernels, monkeypatch, name, quantization, fixed, backend):
    """Both if Python calls attention between the segments and if the native call includes it."""
    model = _model(checkpoint(name, dtype="bfloat16"), quantization=quantization)
    if fixed:
        fix_order(model)
    got = _play(model, backend())
    assert model.model.fused_layers() is not None
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, backend())):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, lambda count: 1], ids=["all", "last"])
@pytest.mark.parametrize("backend", [DenseAttention, CpuFixedAttention])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "smollm3"])
def test_same_bits_of_other_forms(native_kernels, monkeypatch, tmp_path, family, backend, wanted):
    """Sandwich norms, norms with wide weights, soft caps, scores of another scale, and by layer windows, rotary
    embeddings and cache groups.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model = _model(build_family(family, tmp_path, "bfloat16", **sizes))
    fix_order(model)
    got = _play(model, backend(), wanted, num_groups=2)
    assert model.model.fused_layers() is not None
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, backend(), wanted, num_groups=2)):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, lambda count: 1], ids=["all", "last"])
@pytest.mark.parametrize("backend", [DenseAttention, CpuFixedAttention])
@pytest.mark.parametrize(
    ("name", "changes"), [("qwen3-moe", {}), ("qwen3-moe", {"mlp_only_layers": [1]}), ("gpt-oss", {})], ids=str
)
def test_same_bits_of_experts(checkpoint, native_kernels, monkeypatch, name, changes, backend, wanted):
    """Routers with and without biases, sinks, biased experts, and a layer without experts."""
    model = _model(checkpoint(name, dtype="bfloat16", **changes))
    fix_order(model)
    num_groups = len({layer.self_attn.attn.sliding_window for layer in model.model.layers.values()})
    got = _play(model, backend(), wanted, num_groups=num_groups)
    assert model.model.fused_layers() is not None
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, backend(), wanted, num_groups=num_groups)):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, lambda count: 1], ids=["all", "last"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("fixed", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("backend", [DenseAttention, CpuFixedAttention])
@pytest.mark.parametrize(("family", "sizes"), HYBRIDS, ids=str)
def test_same_bits_of_mixers_with_states(
    native_kernels, monkeypatch, tmp_path, family, sizes, backend, fixed, quantization, wanted
):
    """Both if the native call includes convolutions, delta rules and gates, and if Python computes them."""
    model = _model(build_family(family, tmp_path, "bfloat16", **sizes), quantization=quantization)
    if fixed:
        fix_order(model)
    got = _play(model, backend(), wanted)
    assert model.model.fused_layers() is not None
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, backend(), wanted)):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sizes"), HYBRIDS, ids=str)
def test_one_call_for_mixers_with_states(native_kernels, monkeypatch, tmp_path, family, sizes):
    """No part of a layer of these families is left to Python."""
    model = _model(build_family(family, tmp_path, "bfloat16", **sizes))
    monkeypatch.setattr(Segments, "_run_in_turn", lambda *_: pytest.fail("Python runs a part of the layers"))
    _play(model, CpuNativeAttention())
    assert isinstance(model.model.fused_layers(), Segments)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sizes"), HYBRIDS, ids=str)
def test_states_do_not_depend_on_how_a_prompt_is_cut(native_kernels, tmp_path, family, sizes):
    """70 tokens at once, and in steps that end within a piece of the mixers' tokens; the last step has one token."""
    model = _model(build_family(family, tmp_path, "bfloat16", **sizes))
    fix_order(model)
    whole = _play(model, CpuFixedAttention(), steps=[{0: 70}])[0]
    parts = _play(model, CpuFixedAttention(), steps=[{0: 33}, {0: 5}, {0: 31}, {0: 1}])
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", [CpuNativeAttention, CpuFixedAttention, CpuPagedAttention])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias"])
def test_same_bits_with_keys_and_values_in_8_bits(checkpoint, native_kernels, monkeypatch, name, backend, kv_dtype):
    """If the native call includes attention, and if Python calls it between the segments."""
    model = _model(checkpoint(name, dtype="bfloat16", head_dim=64))
    got = _play(model, backend(), kv_dtype=kv_dtype)
    assert model.model.fused_layers() is not None
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, backend(), kv_dtype=kv_dtype)):
        assert torch.equal(ours, theirs)


@pytest.fixture
def two_threads(native_kernels):
    """Two threads: with as many threads as heads, a product would not emit its heads one at a time."""
    native_kernels.lib.quire_set_threads(2)
    yield
    native_kernels.lib.quire_set_threads(torch.get_num_threads())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64},
        {"head_dim": 128},
        {"head_dim": 128, "hidden_size": 2080},
        {"head_dim": 96, "num_key_value_heads": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("mistral", "int8")])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_same_bits_head_by_head(checkpoint, two_threads, monkeypatch, name, quantization, shape, kv_dtype):
    """A product of many rows emits its output one head at a time, also if k takes several runs with several heads in
    each.
    """
    model = _model(checkpoint(name, dtype="bfloat16", **shape), quantization=quantization)
    got = _play(model, CpuNativeAttention(), kv_dtype=kv_dtype)
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for ours, theirs in zip(got, _play(model, CpuNativeAttention(), kv_dtype=kv_dtype)):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [DenseAttention, CpuNativeAttention])
@pytest.mark.parametrize(
    "wanted",
    [lambda count: 1, lambda count: max(1, count - 2), lambda count: int(count == 1)],
    ids=["last", "most", "some"],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2-window"])
def test_same_bits_where_not_all_is_wanted(checkpoint, native_kernels, monkeypatch, name, wanted, backend):
    model = _model(checkpoint(name, dtype="bfloat16"))
    fix_order(model)  # otherwise the bits may depend on the number of rows
    backend = CpuFixedAttention if backend is CpuNativeAttention else backend
    steps = [step for step in STEPS if any(wanted(count) for count in step.values())]
    everything, got = _play(model, backend(), None, steps), _play(model, backend(), wanted, steps)
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    for step, all_rows, ours, theirs in zip(
        steps, everything, got, _play(model, backend(), wanted, steps), strict=True
    ):
        parts = zip(step.values(), all_rows.split(list(step.values())), strict=True)
        assert torch.equal(ours, torch.cat([part[count - wanted(count) :] for count, part in parts])) and torch.equal(
            ours, theirs
        )


@pytest.mark.slow
def test_made_anew_for_another_cache(checkpoint, native_kernels):
    model = _model(checkpoint("qwen3", dtype="bfloat16"))
    first, segments = _play(model), model.model.fused_layers()
    assert all(torch.equal(a, b) for a, b in zip(first, _play(model)))  # each _play has its own cache
    assert model.model.fused_layers() is not segments


def test_only_for_packed_weights(checkpoint, native_kernels):
    model = _model(checkpoint("qwen3"), torch.float32)
    _play(model)
    assert model.model.fused_layers() is None


@pytest.mark.parametrize("hidden", [32, 1024, 3000])
def test_conflicts_of_a_workspace(native_kernels, hidden):
    """The value depends on the machine. The measurement writes zeros to the whole workspace and to no other memory."""
    size = 1024 * (hidden + 32)
    memory = torch.full((size + 2048,), 3.0, dtype=torch.bfloat16)
    assert 1 <= native_kernels.lib.quire_segment_conflicts(memory[1024:].data_ptr(), hidden, 1024) < 1000
    assert not memory[1024 : 1024 + size].any() and (memory[:1024] == 3).all() and (memory[1024 + size :] == 3).all()


def test_a_subclass_with_a_forward_of_its_own_is_called(checkpoint, native_kernels):
    """A subclass does not inherit `native_twin`, so the native code does not replace its forward."""

    class Doubled(SelfAttention):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    plain = _model(checkpoint("qwen3", dtype="bfloat16"))
    model = _model(checkpoint("qwen3", dtype="bfloat16"))
    for layer in model.model.layers.values():
        layer.self_attn.__class__ = Doubled
    results = _play(plain), _play(model)
    assert plain.model.fused_layers() is not None and model.model.fused_layers() is None
    assert not any(torch.equal(a, b) for a, b in zip(*results))
