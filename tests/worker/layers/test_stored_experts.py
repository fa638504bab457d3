"""Mixtures of experts in the quantized formats of the Hub: every expert's weights are exactly those of the formats'
formulas, whole, split over ranks and divided over them; the native kernels give the same logits up to rounding.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.experts import NativeExperts
from quire.worker.layers.linear import Linear
from quire.worker.parallel import Group, use_groups
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.worker import quantized_checkpoints as make
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.worker.layers.test_stored_weights import FORMATS, load, logits_of, weight_of

SIZES = {"hidden_size": 128, "num_hidden_layers": 2}
MODELS = {
    "qwen3-moe": SIZES | {"moe_intermediate_size": 128, "num_experts": 4},
    "deepseek-v3": SIZES
    | {"moe_intermediate_size": 128, "intermediate_size": 256, "n_routed_experts": 4, "n_group": 2, "topk_group": 2}
    | {"num_experts_per_tok": 2, "q_lora_rank": 64, "kv_lora_rank": 64},
    "mixtral": SIZES | {"intermediate_size": 128},
    "hunyuan-moe": SIZES | {"intermediate_size": 128},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made: dict[str, str] = {}

    def source(name: str) -> str:
        if name not in made:
            made[name] = build_checkpoint(name, tmp_path_factory.mktemp(name), **MODELS[name])
        return made[name]

    return source


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_exact(sources, tmp_path, name):
    folder = Path(make.write(sources("qwen3-moe"), tmp_path, *FORMATS[name]))
    stored, plain = load(folder / "quantized"), load(folder / "plain")
    count = 0
    for (path, layer), expected in zip(stored.named_modules(), plain.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), expected.weight), path
            count += ".experts." in path
    assert count >= 8  # two layers of four experts


PARALLEL = [
    "fp8 small blocks",
    "fp8 tensor",
    "ct w4a16 zeros",
    "ct w8a8",
    "ct fp8 channel",
    "ct nvfp4",
    "ct mxfp4",
    "awq",
    "gptq 3",
    "gptq 4 act-order",
    "bnb int8",
    "bnb nf4 nested",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks(sources, tmp_path, name, expert_parallel):
    """Ranks have half of each expert, or half of the experts."""
    folder = Path(make.write(sources("deepseek-v3"), tmp_path, *FORMATS[name]))
    expected, models = logits_of(load(folder / "plain")), []
    for group in thread_groups(2):
        with use_groups(tp=group, ep=group if expert_parallel else Group()):
            models.append(load(folder / "quantized"))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["ct w4a16 zeros", "ct w8a8", "awq", "gptq 4", "gptq 4 act-order", "ct mxfp4", "fp8 tensor"]
)
def test_native_kernels_multiply_what_is_stored(sources, tmp_path, native_kernels, exact_activations, name):
    folder = Path(make.write(sources("qwen3-moe"), tmp_path, *FORMATS[name]))
    exact, native = load(folder / "plain"), load(folder / "quantized", torch.bfloat16, CpuPlatform().ops)
    x = torch.randn(50, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    for theirs, ours in zip(exact.model.layers.values(), native.model.layers.values()):
        weights, ids = theirs.mlp.gate(x.float())  # the same for both: rounding may change a choice
        expected, found = theirs.mlp.experts(x.float(), weights, ids), ours.mlp.experts(x, weights, ids)
        assert float((found.float() - expected).norm()) < 0.01 * float(expected.norm())
        assert name.startswith("fp8") or isinstance(ours.mlp.experts._native, NativeExperts) or "act" in name


@pytest.mark.parametrize("left", ["gate_proj", "down_proj"])
def test_native_kernels_multiply_experts_of_several_kinds(sources, tmp_path, native_kernels, exact_activations, left):
    """One expert is left plain; a call multiplies experts of one kind."""
    config, store = FORMATS["ct w4a16 groups"]
    plain = f"model.layers.0.mlp.experts.1.{left}"
    folder = Path(
        make.write(
            sources("qwen3-moe"),
            tmp_path,
            config | {"ignore": [plain, "lm_head"]},
            lambda name, weight: ({}, weight) if name == plain else store(name, weight),
        )
    )
    exact, native = load(folder / "plain"), load(folder / "quantized", torch.bfloat16, CpuPlatform().ops)
    x = torch.randn(50, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    for i, (theirs, ours) in enumerate(zip(exact.model.layers.values(), native.model.layers.values())):
        weights, ids = theirs.mlp.gate(x.float())
        expected, found = theirs.mlp.experts(x.float(), weights, ids), ours.mlp.experts(x, weights, ids)
        assert float((found.float() - expected).norm()) < 0.01 * float(expected.norm())
        assert isinstance(ours.mlp.experts._native, NativeExperts) == (i > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form", "key", "left"),
    [
        # Kimi K2: only routed experts are quantized
        ("deepseek-v3", "ct w4a16 groups", "ignore", ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"]),
        ("deepseek-v3", "fp8 blocks", "modules_to_not_convert", ["mlp.shared_experts", "self_attn"]),
        ("deepseek-v3", "awq", "modules_to_not_convert", ["shared_experts", "self_attn"]),
        (
            "mixtral",
            "ct w8a16",
            "ignore",
            ["model.layers.0.block_sparse_moe.experts.1.w1", "re:.*self_attn.*", "lm_head"],
        ),
        ("mixtral", "bnb nf4", "llm_int8_skip_modules", ["block_sparse_moe.experts.2.w2", "self_attn"]),
        ("hunyuan-moe", "modelopt nvfp4", "exclude_modules", ["*shared_mlp*", "*self_attn*", "lm_head"]),
        ("qwen3-moe", "gptq 4", "dynamic", ["-:.*self_attn", r"-:model\.layers\.1\.mlp\.experts\.[02]\..*"]),
    ],
)
def test_patterns_are_of_the_files_names(sources, tmp_path, model, form, key, left):
    """Layers that a pattern names are plain, and stored as such."""
    config, store = FORMATS[form]
    patterns = [re.sub(r"^(re:|-:)", "", pattern) for pattern in left]
    if key == "exclude_modules":
        patterns = [pattern.strip("*") for pattern in patterns]
    names = []

    def skip(name: str, weight: torch.Tensor):
        if any(re.search(pattern, name) for pattern in patterns):
            names.append(name)
            return {}, weight
        return store(name, weight)

    value = {pattern: {} for pattern in left} if key == "dynamic" else left
    folder = Path(make.write(sources(model), tmp_path, config | {key: value}, skip))
    assert any("experts" in name or "shared" in name for name in names)
    stored, plain = load(folder / "quantized"), load(folder / "plain")
    for (path, layer), expected in zip(stored.named_modules(), plain.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), expected.weight), path


def test_a_missing_expert_is_named(sources, tmp_path):
    folder = Path(make.write(sources("qwen3-moe"), tmp_path, *FORMATS["ct w4a16 groups"]))
    tensors = load_file(folder / "quantized" / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight_packed"]
    save_file(tensors, folder / "quantized" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight_packed"):
        load(folder / "quantized")
