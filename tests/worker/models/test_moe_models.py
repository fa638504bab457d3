"""Mixtures of experts: forms of the files, ranks, rounding, and what a config.json must not say. The families' logits
are compared in test_models.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.configs.config import Config
from quire.worker.cpu import native
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.linear import PLAIN_WEIGHTS
from quire.worker.layers.moe import ListedExperts, StackedExperts, run_experts
from quire.worker.layers.quantization.fp4 import mxfp4_blocks
from quire.worker.limits import resolve_limits
from quire.worker.models.registry import build_model, parse_model_spec, read_model_spec
from quire.worker.parallel import use_groups
from quire.worker.spec.model import kv_bytes_per_token
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.startup.ranks import Ranks
from quire.worker.startup.resolve import resolve
from quire.worker.weights.loader import load_weights
from tests.helpers.models.checkpoints import MOE_CHECKPOINTS
from tests.helpers.worker.dense_attention import PagedRunner
from tests.helpers.worker.quantized_checkpoints import awq, fp8, gptq, write
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.worker.models.test_models import kernels, load, prompts, reference_logits  # noqa: F401
from tests.worker.test_tensor_parallel import logits_of

CPU = torch.device("cpu")


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def rewritten(folder: str, target: Path, tensors: dict[str, torch.Tensor]) -> str:
    """A checkpoint with the configuration of `folder` and other tensors."""
    target.mkdir()
    (target / "config.json").write_text(Path(folder, "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return str(target)


def fused(tensors: dict[str, torch.Tensor], transposed: bool) -> dict[str, torch.Tensor]:
    """The tensors of all experts of a layer in one: `[E, 2 I, H]` and `[E, H, I]`, or transposed."""
    turn = (lambda t: t.transpose(1, 2)) if transposed else (lambda t: t)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        num = len({name.split(".")[5] for name in tensors if name.startswith(f"{layer}.experts.")})
        of = [
            {side: tensors[f"{layer}.experts.{i}.{side}_proj.weight"] for side in ("gate", "up", "down")}
            for i in range(num)
        ]
        kept[f"{layer}.experts.gate_up_proj"] = turn(torch.stack([torch.cat([e["gate"], e["up"]]) for e in of]))
        kept[f"{layer}.experts.down_proj"] = turn(torch.stack([e["down"] for e in of]))
    return kept


@pytest.mark.parametrize("transposed", [False, True])
def test_files_with_all_experts_in_one_tensor(checkpoint, tmp_path, transposed):
    folder = checkpoint("qwen3-moe")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in tensors_of(folder)
    other = rewritten(folder, tmp_path / "fused", fused(tensors_of(folder), transposed))
    assert torch.equal(logits_of(load(other)), logits_of(load(folder)))


def test_missing_experts_are_named(checkpoint, tmp_path):
    folder, name = checkpoint("qwen3-moe"), "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = tensors_of(folder)
    del tensors[name]
    with pytest.raises(ValueError, match=f"missing: {name}"):
        load(rewritten(folder, tmp_path / "less", tensors))


def experts_of(cls, moe: MoESpec, hidden: int):
    return cls(hidden, moe, "e", *([PLAIN_WEIGHTS] if cls is ListedExperts else []))


def fill(experts: torch.nn.Module, tensors: dict[str, torch.Tensor], fused_files: bool) -> None:
    for parameter in experts.parameters():
        parts = parameter.parts
        if fused_files and parts[0].name not in tensors:
            parts = next(other for other in parameter.other_parts if tensors[other[0].name].shape == other[0].shape)
        for part in parts:
            target = parameter.data
            for narrow in part.target:
                target = target.narrow(*narrow)
            target.copy_(part.take(tensors[part.name]))


@pytest.mark.parametrize("cls", [ListedExperts, StackedExperts])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("files", ["each", "fused", "transposed", "interleaved"])
def test_forms_of_experts(cls, expert_parallel, files):
    """Both forms hold the same experts, from every form of files, over two ranks."""
    num, hidden, size = 4, 12, 8
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(num, size, hidden, generator=generator) for _ in range(2))
    down = torch.randn(num, hidden, size, generator=generator)
    biased = files == "interleaved"
    gate_bias, up_bias = (torch.randn(num, size, generator=generator) * biased for _ in range(2))
    down_bias = torch.randn(num, hidden, generator=generator) * biased
    moe = MoESpec(RoutingSpec(num, 2), size, bias=biased, interleaved=biased, transposed=biased)
    rows = torch.stack([gate, up], 2).flatten(1, 2) if biased else torch.cat([gate, up], 1)
    turn = (lambda t: t.transpose(1, 2)) if files in ("transposed", "interleaved") else (lambda t: t)
    tensors = {
        "e.gate_up_proj": turn(rows),
        "e.down_proj": turn(down),
        "e.gate_up_proj_bias": torch.stack([gate_bias, up_bias], 2).flatten(1, 2),
        "e.down_proj_bias": down_bias,
    }
    if files == "each":
        each = (("gate", gate), ("up", up), ("down", down))
        tensors = {f"e.{i}.{name}_proj.weight": stack[i] for name, stack in each for i in range(num)}

    def expert(i):
        return lambda x: (
            (torch.nn.functional.silu(x @ gate[i].T + gate_bias[i]) * (x @ up[i].T + up_bias[i])) @ down[i].T
            + down_bias[i]
        )

    x, routing = torch.randn(5, hidden, generator=generator), torch.rand(5, 2, generator=generator)
    ids = torch.rand(5, num, generator=generator).topk(2).indices
    want = run_experts(x, routing, ids, {i: expert(i) for i in range(num)})
    got = torch.zeros_like(want)
    for group in thread_groups(2):
        with use_groups(tp=group, ep=group if expert_parallel else None), torch.inference_mode():
            experts = experts_of(cls, moe, hidden)
            fill(experts, tensors, files != "each")
            for module in experts.modules():
                if module is not experts and hasattr(module, "finalize"):
                    module.finalize()
            got += experts(x, routing, ids)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_correction_biases_keep_their_float32_in_a_bfloat16_model(checkpoint, tmp_path):
    folder, name = checkpoint("glm4-moe", dtype="bfloat16"), "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.linspace(1.0, 1.001, 8)  # bfloat16 would round all of them to 1
    model = load(rewritten(folder, tmp_path / "wide", tensors_of(folder) | {name: bias}), torch.bfloat16)
    assert torch.equal(model.model.layers["1"].mlp.gate.correction, bias) and bias.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE_CHECKPOINTS)
def test_bfloat16_is_as_close_as_transformers(checkpoint, name, kernels):  # noqa: F811
    """Rounding may change which experts a token passes, so the median over tokens is compared."""
    folder = checkpoint(name, dtype="bfloat16")
    texts = prompts([200])
    (exact,), (rounded,) = reference_logits(folder, texts), reference_logits(folder, texts, "bfloat16")
    model = load(folder, torch.bfloat16)
    logits = model.logits(PagedRunner(model, 1, 256).step({0: texts[0]})[0])
    assert median_error(logits, exact) < 1.3 * median_error(rounded, exact)


def median_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error of the logits of the median token."""
    return ((logits - exact).norm(dim=1) / exact.norm(dim=1)).median().item()


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("int4", 0.5)])
def test_experts_quantized_at_load(checkpoint, kernels, exact_activations, monkeypatch, quantization, most):  # noqa: F811
    if kernels == "plain":
        pytest.skip("compares the native kernels with torch")
    folder = checkpoint("qwen3-moe", dtype="bfloat16", hidden_size=128, moe_intermediate_size=128)
    (exact,) = reference_logits(folder, texts := prompts([100]))
    spec = read_model_spec(folder)

    def logits() -> torch.Tensor:
        model = build_model(spec, torch.bfloat16, CPU, quantization=quantization, ops=CpuPlatform().ops)
        load_weights(model, spec, folder)
        return model.logits(PagedRunner(model, 1, 128).step({0: texts[0]})[0])

    native_logits = logits()
    monkeypatch.setattr(native.KERNELS, "lib", None)
    assert median_error(native_logits, logits()) < 0.02
    assert median_error(native_logits, exact) < most


def mxfp4_checkpoints(folder: str, target: Path) -> tuple[str, str]:
    """A checkpoint of gpt-oss with other experts, dequantized and in MXFP4."""
    tensors, generator = tensors_of(folder), torch.Generator().manual_seed(5)
    plain, stored = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), generator=generator).byte()
        exponents = torch.randint(122, 126, (num, outputs, inputs // 32), generator=generator).byte()
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        del stored[name]
        plain[name] = mxfp4_blocks(blocks, exponents).transpose(1, 2)
    quantized = rewritten(folder, target / "mxfp4", stored)
    path = Path(quantized, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return rewritten(folder, target / "plain", plain), quantized


def test_mxfp4_experts_of_gpt_oss(checkpoint, tmp_path, kernels):  # noqa: F811
    """Blocks and exponents as in its checkpoints, against transformers with the same weights dequantized."""
    folder = checkpoint("gpt-oss", intermediate_size=64)
    plain, quantized = mxfp4_checkpoints(folder, tmp_path)
    (want,) = reference_logits(plain, texts := prompts([70]))
    logits = [load(quantized, dtype) for dtype in (torch.float32, torch.bfloat16)]
    exact, rounded = (model.logits(PagedRunner(model, 1, 128).step({0: texts[0]})[0]) for model in logits)
    torch.testing.assert_close(exact, want, atol=1e-4, rtol=0)
    assert median_error(rounded, want) < 0.03
    models = []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(quantized))
    expected = logits_of(load(quantized))
    for ranks in run_ranks(lambda rank: logits_of(models[rank]), 2):
        torch.testing.assert_close(ranks, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hunyuan-moe", {"moe_topk": [1, 2, 2]}, "num_experts_per_tok has 3 numbers for 2 layers"),
        ("gpt-oss", {"swiglu_limit": 10.0}, "swiglu_limit 10.0 is not supported"),
        ("glm4-moe", {"n_group": 3}, "n_group 3 must divide the 8 experts"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer, not 0"),
    ],
)
def test_refusals_name_the_key(checkpoint, name, changes, message):
    raw = json.loads(Path(checkpoint(name), "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        parse_model_spec(raw | changes)


def test_legacy_spellings_give_one_spec(checkpoint):
    raw = json.loads(Path(checkpoint("mixtral"), "config.json").read_text())
    for old in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        kept = {key: value for key, value in raw.items() if key not in ("num_local_experts", "num_experts")}
        assert parse_model_spec(kept | {old: 6}).layers[0].moe.routing.num_experts == 6


def test_settings_that_do_not_fit(checkpoint):
    def limits(name: str, changes: dict | None = None, **settings):
        folder = checkpoint(name, **changes or {})
        config = Config.from_flat(model=folder, device="cpu", **settings)
        return resolve_limits(config, read_model_spec(folder), CpuPlatform())

    with pytest.raises(ValueError, match="--enable-expert-parallel: Qwen3ForCausalLM has no experts"):
        limits("qwen3", enable_expert_parallel=True)
    with pytest.raises(ValueError, match="the number of experts 6 cannot be split over tensor_parallel_size 4"):
        limits("qwen3-moe", {"num_experts": 6}, enable_expert_parallel=True, tensor_parallel_size=4)


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-5"])
def test_contexts_within_the_index_need_none(checkpoint, name):
    """Without an index, its weights and the memory of its keys are not there, and the result is the same."""
    folder = checkpoint(name)

    def resolved(length: str):
        config = Config.from_flat(model=folder, device="cpu", max_model_len=length)
        return resolve(config, Ranks(config), preview=True)

    short, long = resolved("20"), resolved("21")
    assert all(layer.index is None for layer in short.spec.layers) and all(layer.index for layer in long.spec.layers)
    assert kv_bytes_per_token(short.spec, 4) < kv_bytes_per_token(long.spec, 4)
    models = []
    for spec in (short.spec, long.spec):
        models.append(build_model(spec, torch.float32, torch.device("cpu")))
        load_weights(models[-1], spec, folder)
    assert sum(".indexer." in one for one, _ in models[0].named_parameters()) == 0
    runners = [PagedRunner(model, 1, 64) for model in models]
    first, second = (model.logits(run.step({0: prompts([30])[0]})[0]) for model, run in zip(models, runners))
    difference = (first - second).abs().amax(1)
    assert (difference[:20] < 1e-4).all() and (difference[20:] > 1e-3).any()


@pytest.mark.slow
@pytest.mark.parametrize("stored", [fp8(16), fp8(None), gptq(4, 16), awq(16)], ids=["fp8", "fp8-tensor", "gptq", "awq"])
def test_quantized_latent_attention(checkpoint, tmp_path, stored):
    """`kv_b_proj`, which attention multiplies from both sides, is dequantized."""
    folder = Path(write(checkpoint("deepseek-v3"), tmp_path, *stored))
    assert sum("0.self_attn.kv_b_proj" in name for name in tensors_of(folder / "quantized")) > 1
    expected = logits_of(load(str(folder / "plain")))
    torch.testing.assert_close(logits_of(load(str(folder / "quantized"))), expected, atol=1e-3, rtol=1e-3)
    models = []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(str(folder / "quantized")))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
